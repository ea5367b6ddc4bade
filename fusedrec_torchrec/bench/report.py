"""Makes tables of a benchmark's figures, for terminals and for Markdown files."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from fusedrec_torchrec.bench.allocators import Allocator
from fusedrec_torchrec.bench.figures import (
    ALLOCATOR_TITLES,
    BOUNDS,
    KINDS,
    SystemFigures,
    WorkloadFigures,
    side_by_side,
)
from fusedrec_torchrec.bench.fusion import Fusion
from fusedrec_torchrec.bench.suite import CODEC_SYSTEMS, HOT_SYSTEMS, OURS
from fusedrec_torchrec.core.terminal import human_bytes, print_table

__all__ = ["Table", "print_report", "tables"]


@dataclass(frozen=True)
class Table:
    """Is a table of texts."""

    title: str
    columns: tuple[str, ...]
    rows: list[tuple[str, ...]]

    def markdown(self) -> str:
        """Returns the table in Markdown, without its title."""
        lines = [self.columns, tuple("---" for _ in self.columns), *self.rows]
        return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def tables(workloads: Sequence[WorkloadFigures]) -> Iterator[Table]:
    """Yields all tables that the figures have something for."""
    yield speeds(workloads)
    with_fused = [w for w in workloads if w.fused is not None]
    if with_fused:
        yield wire(with_fused)
    if any(system.bytes_by_kind for w in workloads for system in w.systems.values()):
        yield traffic(workloads)
    if any(map(Fusion.measured, workloads)):
        yield fusion([w for w in workloads if Fusion.measured(w)])
    if any(w.bound_seconds for w in with_fused):
        yield bounds([w for w in with_fused if w.bound_seconds])
    if any(w.phases for w in with_fused):
        yield phases([w for w in with_fused if w.phases])
    if with_fused:
        yield crossover(with_fused)
    if any(w.imbalance for w in workloads):
        yield hot_rows([w for w in workloads if w.imbalance])
    coded = [w for w in with_fused if any(name in w.systems for name in CODEC_SYSTEMS)]
    if coded:
        yield codecs(coded)
    yield memory(workloads)


def allocators_of(workloads: Sequence[WorkloadFigures]) -> list[Allocator]:
    """Returns the allocators of all workloads, each once."""
    return list(dict.fromkeys(w.allocator for w in workloads))


def with_allocator(column: str, allocator: Allocator) -> str:
    """Returns the name of a column of figures with an allocator."""
    title = ALLOCATOR_TITLES[allocator]
    return f"{column}, {title}" if title else column


def _allocator_names(workloads: Sequence[WorkloadFigures]) -> str:
    """Returns what stands left and right of slashes in cells; nothing for the default alone."""
    allocators = allocators_of(workloads)
    if allocators == ["default"]:
        return ""
    return "; " + " / ".join(ALLOCATOR_TITLES[a] or "default allocator" for a in allocators)


def _system_cells(
    group: dict[Allocator, WorkloadFigures],
    allocators: Sequence[Allocator],
    names: Sequence[str],
    text: Callable[[SystemFigures], str],
) -> Iterator[str]:
    """Yields a cell for each system, with its figures for all allocators."""
    for name in names:
        systems = [group[a].systems.get(name) for a in allocators if a in group]
        yield " / ".join(text(system) for system in systems if system is not None)


def speeds(workloads: Sequence[WorkloadFigures]) -> Table:
    """Shows median times of a step, the best stock system, and its ratio to the fused step.

    Where several systems of ours were measured, also the ratio to the best of them.
    """
    names = list(dict.fromkeys(name for w in workloads for name in w.systems))
    allocators = allocators_of(workloads)
    several = any(sum(name in OURS for name in w.systems) > 1 for w in workloads)
    rows: list[tuple[str, ...]] = []
    for group in side_by_side(workloads):
        cells = list(_system_cells(group, allocators, names, lambda s: f"{s.milliseconds:.1f}"))
        for allocator in allocators:
            w = group.get(allocator)
            cells += [
                w.best_stock.name if w and w.best_stock else "",
                str(w.speed_up or "") if w else "",
            ]
            if several:
                cells += [
                    w.best_ours.name if w and w.best_ours else "",
                    str(w.best_speed_up or "") if w else "",
                ]
        rows.append((next(iter(group.values())).title, *cells))
    ratios = ["best stock", "best stock / fused"]
    if several:
        ratios += ["best of ours", "best stock / best of ours"]
    return Table(
        "milliseconds of a training step, and best stock / fused (95 % interval)"
        + _allocator_names(workloads),
        ("workload", *names, *(with_allocator(r, a) for a in allocators for r in ratios)),
        rows,
    )


def traffic(workloads: Sequence[WorkloadFigures]) -> Table:
    """Shows what every system sends in a step, by kind, and its rows against the least.

    The least are distinct rows or distinct bags, whichever are fewer in a table.  Rows that ranks
    get from themselves count above as well as below.
    """
    rows: list[tuple[str, ...]] = []
    for group in side_by_side(workloads):
        w = next(iter(group.values()))  # what is sent does not depend on the allocator
        for name, system in w.systems.items():
            ratio = system.rows_over_least
            rows.append(
                (
                    w.title,
                    name,
                    f"{system.collectives:g}",
                    *(human_bytes(system.bytes_by_kind.get(kind, 0)) for kind in KINDS),
                    "" if ratio is None else f"{ratio:.3f}",
                )
            )
    return Table(
        "sent in a step by all ranks; rows / min(distinct bags, distinct rows) of each table",
        ("workload", "system", "collectives", *KINDS, "rows / least"),
        rows,
    )


def fusion(workloads: Sequence[WorkloadFigures]) -> Table:
    """Shows what fusing adds to dedup: messages, their bandwidth, and the time of a step."""
    rows: list[tuple[str, ...]] = []
    for w in workloads:
        f = Fusion(w)
        both = (f.apart, f.fused)
        rows.append(
            (
                w.label,
                " / ".join(f"{m.rounds}" for m in both),
                " / ".join(human_bytes(round(median(m.sizes))) for m in both),
                " / ".join(f"{m.small:.0%}" for m in both),
                " / ".join(f"{m.bandwidth / 1e6:.0f}" for m in both),
                str(f.bandwidth),
                str(f.speed_up),
                str(f.no_dedup or ""),
            )
        )
    return Table(
        "dedup by table / fused: the same rows in many messages and in few (95 % interval)",
        (
            "workload",
            "rounds of a step",
            "median message",
            "under 64 KiB",
            "MB/s a rank sends",
            "bandwidth, fused / by table",
            "step, by table / fused",
            "step, best stock / fused",
        ),
        rows,
    )


def wire(workloads: Sequence[WorkloadFigures]) -> Table:
    """Shows the exact bytes and collectives of a step."""
    rows: list[tuple[str, ...]] = []
    for group in side_by_side(workloads):
        w = next(iter(group.values()))  # what is sent does not depend on the allocator
        assert w.fused is not None
        least = w.least_row_bytes
        stock = w.best_stock
        rows.append(
            (
                w.title,
                f"{w.fused.collectives:g}",
                human_bytes(w.row_bytes),
                f"{w.row_bytes / least:.4f}" if least else "",
                f"{w.id_bytes / w.row_bytes:.2%}" if w.row_bytes else "",
                f"{stock.collectives:g}" if stock else "",
                human_bytes(stock.bytes_sent) if stock else "",
                _bytes_of(w, "row_wise"),
            )
        )
    return Table(
        "on the wire in a step, all ranks",
        (
            "workload",
            "fused collectives",
            "rows and gradients",
            "/ lower bound",
            "ids and headers / rows",
            "best stock's collectives",
            "best stock's bytes",
            "row_wise: ideal, on gloo",
        ),
        rows,
    )


def _bytes_of(w: WorkloadFigures, name: str) -> str:
    system = w.systems.get(name)
    if system is None:
        return ""
    return f"{human_bytes(system.bytes_sent)}, {human_bytes(system.gloo_bytes_sent)}"


def crossover(workloads: Sequence[WorkloadFigures]) -> Table:
    """Shows distinct rows for each row of output, what is faster, and what the planner picks."""
    allocators = allocators_of(workloads)
    with_bags = any(w.bags_per_output is not None for w in workloads)
    rows: list[tuple[str, ...]] = []
    for group in side_by_side(workloads):
        w = next(iter(group.values()))
        share = w.bags_per_output
        cells = [f"{w.rows_per_output:.2f}"]
        if with_bags:
            cells.append("" if share is None else f"{share:.2f}")
        for allocator in allocators:
            figures = group.get(allocator)
            cells += [str(figures.speed_up or ""), figures.advice] if figures else ["", ""]
        cells.append(", ".join(f"{n} x {name}" for name, n in w.planner_picks.items()))
        rows.append((w.title, *cells))
    return Table(
        "what to use, measured, and what FusedShardingPlanner picks without a profile",
        (
            *("workload", "distinct rows / outputs"),
            *(["distinct bags / outputs"] if with_bags else []),
            *(with_allocator(c, a) for a in allocators for c in ("best stock / fused", "use")),
            "planner picks",
        ),
        rows,
    )


def hot_rows(workloads: Sequence[WorkloadFigures]) -> Table:
    """Shows systems with hot rows against the fused step without, and how owners are asked."""
    names = [name for name in HOT_SYSTEMS if any(name in w.systems for w in workloads)]
    rows: list[tuple[str, ...]] = []
    for w in workloads:
        cells = []
        for name in names:
            system = w.systems.get(name)
            if system is None:
                cells.append("")
                continue
            ratio = str(system.against_fused or "")
            cells.append(f"{ratio}, {system.collectives:g}, {human_bytes(system.bytes_sent)}")
        share = w.hits.get(w.config.hot_rows)
        rows.append(
            (
                w.label,
                f"{w.fused.collectives:g}, {human_bytes(w.fused.bytes_sent)}" if w.fused else "",
                *cells,
                f"{share[0]:.0%} of rows, {share[1]:.0%} of ids" if share else "",
                " / ".join(f"{value:.2f}" for value in w.imbalance.values()),
            )
        )
    return Table(
        "hot rows: time / fused step (95 % interval), messages and bytes of a step",
        (
            "workload",
            "fused_row_wise",
            *names,
            "hot",
            "most asked owner / mean: row_wise, fused, with hot rows",
        ),
        rows,
    )


def codecs(workloads: Sequence[WorkloadFigures]) -> Table:
    """Shows bytes and time of systems with codecs against the fused step without."""
    names = [name for name in CODEC_SYSTEMS if any(name in w.systems for w in workloads)]
    rows: list[tuple[str, ...]] = []
    for w in workloads:
        cells = []
        for name in names:
            system = w.systems.get(name)
            if system is None:
                cells.append("")
                continue
            sent = w.row_bytes_of(name)
            fewer = w.row_bytes / max(sent, 1)
            cells.append(f"{human_bytes(sent)}, {fewer:.2f}x fewer; {system.against_fused}")
        rows.append((w.label, human_bytes(w.row_bytes), *cells))
    return Table(
        "codecs: rows and gradients of a step, all ranks; time / fused step (95 % interval)",
        ("workload", "fp32", *names),
        rows,
    )


def bounds(workloads: Sequence[WorkloadFigures]) -> Table:
    """Shows the fused step against the least it could cost."""
    rows: list[tuple[str, ...]] = []
    for w in workloads:
        assert w.fused is not None
        medians = {name: 1e3 * sorted(t)[len(t) // 2] for name, t in w.bound_seconds.items()}
        rows.append(
            (
                w.label,
                f"{w.measured['unique'] / max(w.measured['ids'], 1):.1%}",
                *(f"{medians[name]:.2f}" if name in medians else "" for name in BOUNDS),
                f"{w.fused.milliseconds:.2f}",
                str(w.efficiency or ""),
            )
        )
    return Table(
        "lower bounds in milliseconds, and efficiency = their sum / step (95 % interval)",
        ("workload", "unique ids", *BOUNDS, "fused step", "efficiency"),
        rows,
    )


def phases(workloads: Sequence[WorkloadFigures]) -> Table:
    """Shows where the fused step's time goes, and how much the named stages account for."""
    names = [
        name for name in workloads[0].phases if any(w.phases.get(name, 0) > 0 for w in workloads)
    ]  # none of hot rows where there are none
    rows: list[tuple[str, ...]] = []
    for w in workloads:
        assert w.fused is not None
        step, other = w.phases["step"], w.phases["other"]
        rows.append(
            (
                w.label,
                *(f"{w.phases.get(name, 0.0):.2f}" for name in names),
                f"{1 - other / step:.0%}",
                f"{step / w.fused.milliseconds:.2f}",
            )
        )
    return Table(
        "stages of the fused step in milliseconds, mean of all ranks",
        ("workload", *names, "accounted for", "step here / step above"),
        rows,
    )


def memory(workloads: Sequence[WorkloadFigures]) -> Table:
    """Shows the peak memory of a rank, each system in processes of its own."""
    names = list(dict.fromkeys(name for w in workloads for name in w.systems))
    allocators = allocators_of(workloads)
    rows: list[tuple[str, ...]] = [
        (
            next(iter(group.values())).title,
            *_system_cells(group, allocators, names, lambda system: human_bytes(system.memory)),
        )
        for group in side_by_side(workloads)
    ]
    return Table(
        "peak memory of a rank beyond libraries and data, tables included"
        + _allocator_names(workloads),
        ("workload", *names),
        rows,
    )


def print_report(document: dict[str, Any], workloads: Sequence[WorkloadFigures]) -> None:
    """Prints all tables, and what was left out."""
    for table in tables(workloads):
        print_table(table.title, table.columns, table.rows)
        print()
    for name, reason in document["left_out"].items():
        print(f"left out: {name}: {reason}")
    for w in workloads:
        for name, reason in w.measured["left_out"].items():
            print(f"left out of {w.label}: {name}: {reason}")
