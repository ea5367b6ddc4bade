"""Makes tables of a benchmark's figures, for terminals and for Markdown files."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from fusedrec_torchrec.bench.figures import WorkloadFigures
from fusedrec_torchrec.bench.suite import CODEC_SYSTEMS, HOT_SYSTEMS
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
        yield bounds(with_fused)
        yield phases(with_fused)
        yield crossover(with_fused)
    if any(w.imbalance for w in workloads):
        yield hot_rows([w for w in workloads if w.imbalance])
    coded = [w for w in with_fused if any(name in w.systems for name in CODEC_SYSTEMS)]
    if coded:
        yield codecs(coded)
    yield memory(workloads)


def speeds(workloads: Sequence[WorkloadFigures]) -> Table:
    """Shows median times of a step, the best stock system, and its ratio to the fused step."""
    names = list(dict.fromkeys(name for w in workloads for name in w.systems))
    rows: list[tuple[str, ...]] = []
    for w in workloads:
        times = {name: f"{system.milliseconds:.1f}" for name, system in w.systems.items()}
        rows.append(
            (
                w.title,
                *(times.get(name, "") for name in names),
                w.best_stock.name if w.best_stock else "",
                str(w.speed_up or ""),
            )
        )
    return Table(
        "milliseconds of a training step, and best stock / fused (95 % interval)",
        ("workload", *names, "best stock", "best stock / fused"),
        rows,
    )


def wire(workloads: Sequence[WorkloadFigures]) -> Table:
    """Shows the exact bytes and collectives of a step."""
    rows: list[tuple[str, ...]] = []
    for w in workloads:
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
    return Table(
        "what to use, measured, and what FusedShardingPlanner picks without a profile",
        ("workload", "distinct rows / outputs", "best stock / fused", "use", "planner picks"),
        [
            (
                w.title,
                f"{w.rows_per_output:.2f}",
                str(w.speed_up or ""),
                w.advice,
                ", ".join(f"{n} x {name}" for name, n in w.planner_picks.items()),
            )
            for w in workloads
        ],
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
                w.title,
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
        rows.append((w.title, human_bytes(w.row_bytes), *cells))
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
                w.title,
                f"{w.measured['unique'] / max(w.measured['ids'], 1):.1%}",
                *(f"{value:.2f}" for value in medians.values()),
                f"{w.fused.milliseconds:.2f}",
                str(w.efficiency),
            )
        )
    return Table(
        "lower bounds in milliseconds, and efficiency = their sum / step (95 % interval)",
        ("workload", "unique ids", "exchange", "lookup", "gather", "fused step", "efficiency"),
        rows,
    )


def phases(workloads: Sequence[WorkloadFigures]) -> Table:
    """Shows where the fused step's time goes, and how much the named stages account for."""
    names = list(workloads[0].phases)
    rows: list[tuple[str, ...]] = []
    for w in workloads:
        assert w.fused is not None
        step, other = w.phases["step"], w.phases["other"]
        rows.append(
            (
                w.title,
                *(f"{w.phases[name]:.2f}" for name in names),
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
    rows: list[tuple[str, ...]] = []
    for w in workloads:
        sizes = {name: human_bytes(system.memory) for name, system in w.systems.items()}
        rows.append((w.title, *(sizes.get(name, "") for name in names)))
    return Table(
        "peak memory of a rank beyond libraries and data, tables included",
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
            print(f"left out of {w.title}: {name}: {reason}")
