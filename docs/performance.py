"""Writes the tables and plots of speed: README and the pages of docs with marks as below.

    python docs/performance.py

A table stands between ``<!-- speeds of targets -->`` and ``<!-- end -->``: its kind, and the suites
that it is about.  The measurements are in benchmarks/results, from
`make performance DATA=train.txt.gz`, `make hot` and `make compression`.
"""

import re
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median

from fusedrec_torchrec.bench import report
from fusedrec_torchrec.bench.allocators import Allocator
from fusedrec_torchrec.bench.figures import ALLOCATOR_TITLES, WorkloadFigures, side_by_side
from fusedrec_torchrec.bench.plots import draw
from fusedrec_torchrec.bench.report import Table
from fusedrec_torchrec.bench.results import RESULTS, load_results
from fusedrec_torchrec.bench.statistics import Ratio
from fusedrec_torchrec.core.terminal import human_bytes
from fusedrec_torchrec.sharding.sharding_type import FUSED

DOCS = Path(__file__).parent
MEASURED = DOCS.parent / "benchmarks" / "results"
MARK = re.compile(r"(<!-- (?!end)(\w+) of ([\w ]+) -->\n).*?(<!-- end -->)", re.DOTALL)
PAGES = tuple(
    page
    for page in (*sorted(DOCS.glob("*.md")), DOCS.parent / "README.md")
    if MARK.search(page.read_text())
)
PLOTS = {
    "targets": ("breakdown", "bytes"),
    "links": ("speed_up",),
    "workloads": ("speed_up",),
    "growth": ("growth",),
    "crossover": ("speed_up",),
    "mlperf": ("speed_up", "bytes"),
    "hot": ("hit_rates",),
}


def figures_of(suite: str) -> list[WorkloadFigures]:
    """Returns the figures of all workloads that a suite has measured."""
    document = load_results(MEASURED / suite / RESULTS)
    return [WorkloadFigures(result) for result in document["results"]]


def ratio_cells(
    group: dict[Allocator, WorkloadFigures], allocators: Sequence[Allocator], system: str = ""
) -> list[str]:
    """Returns best stock step / step of a system of ours, the headline's if none is named."""
    cells = []
    for allocator in allocators:
        w = group.get(allocator)
        name = "" if w is None else system or (w.headline or "")
        measured = w is not None and name in w.systems
        cells.append(str(w.speed_up_of(name) or "") if measured and w is not None else "")
    return cells


def outcomes(workloads: Sequence[WorkloadFigures]) -> Table:
    """Counts the workloads on which fused tables were faster, as fast, and slower than stock."""
    rows: list[tuple[str, ...]] = []
    for allocator in report.allocators_of(workloads):
        chosen = [w for w in workloads if w.allocator == allocator]
        ratios = [w.speed_up for w in chosen if w.speed_up is not None]
        faster = sum(ratio.low > 1 for ratio in ratios)
        slower = sum(ratio.high < 1 for ratio in ratios)
        medians = [ratio.median for ratio in ratios]
        rows.append(
            (
                ALLOCATOR_TITLES[allocator] or "default",
                str(len(ratios)),
                str(faster),
                str(len(ratios) - faster - slower),
                str(slower),
                ", ".join(f"{f(medians):.2f}" for f in (min, median, max)),
            )
        )
    counts = ("workloads", "fused is faster", "no difference", "stock is faster")
    return Table("", ("allocator", *counts, "ratio: least, median, most"), rows)


def where_stock_wins(workloads: Sequence[WorkloadFigures]) -> Table:
    """Shows all workloads on which the best stock step was shorter, with any allocator."""
    rows: list[tuple[str, ...]] = []
    for w in workloads:
        if w.speed_up is None or w.speed_up.median >= 1:
            continue
        assert w.fused is not None and w.best_stock is not None
        allocator = ALLOCATOR_TITLES[w.allocator] or "default"
        ratio = str(w.speed_up)
        rows.append((w.title, allocator, w.fused.name, w.best_stock.name, ratio))
    if not rows:
        rows.append(("none", "", "", "", ""))
    columns = ("workload", "allocator", "fused system", "best stock", "best stock / fused")
    return Table("", columns, rows)


def costs(workloads: Sequence[WorkloadFigures]) -> Table:
    """Shows the collectives and bytes of the fused step, and how close it comes to its limit."""
    allocators = report.allocators_of(workloads)
    rows: list[tuple[str, ...]] = []
    for group in side_by_side(workloads):
        w = next(iter(group.values()))
        assert w.fused is not None
        limits = (group[a].efficiency if a in group else None for a in allocators)
        rows.append(
            (
                w.title,
                f"{w.fused.collectives:g}",
                f"{w.row_bytes / w.least_row_bytes:.4f}",
                f"{w.id_bytes / w.row_bytes:.2%}",
                *(str(limit or "") for limit in limits),
            )
        )
    columns = ("workload", "collectives", "rows / least rows", "ids / rows")
    limits_of = (report.with_allocator("efficiency", a) for a in allocators)
    return Table("", (*columns, *limits_of), rows)


def who_pools(workloads: Sequence[WorkloadFigures]) -> Table:
    """Compares pooling at the requester with the planner's choice, and both with stock."""
    allocators = report.allocators_of(workloads)
    rows: list[tuple[str, ...]] = []
    for group in side_by_side(workloads):
        w = next(iter(group.values()))
        bags = w.bags_per_output
        rows.append(
            (
                w.title,
                f"{w.rows_per_output:.2f}",
                "" if bags is None else f"{bags:.2f}",
                *ratio_cells(group, allocators, FUSED),
                *ratio_cells(group, allocators),
                ", ".join(w.planner_picks),
            )
        )
    systems = (f"best stock / {FUSED}", "best stock / planner's choice")
    return Table(
        "",
        (
            *("workload", "distinct rows / outputs", "distinct bags / outputs"),
            *(report.with_allocator(name, a) for name in systems for a in allocators),
            "planner's choice",
        ),
        rows,
    )


def more_tables(workloads: Sequence[WorkloadFigures]) -> Table:
    """Shows how much longer a step is with many tables than with few, for as many ids."""
    allocators = report.allocators_of(workloads)
    chosen = [w for w in workloads if w.config.series == "tables"]
    few = min(w.config.tables for w in chosen)
    many = max(w.config.tables for w in chosen)
    steps = {
        (name, w.allocator, w.config.tables): system.milliseconds
        for w in chosen
        for name, system in w.systems.items()
    }
    rows: list[tuple[str, ...]] = []
    for name in dict.fromkeys(name for name, _, _ in steps):
        pairs = [(steps.get((name, a, few)), steps.get((name, a, many))) for a in allocators]
        rows.append(
            (name, *(f"{last / first:.2f}" if first and last else "" for first, last in pairs))
        )
    ratio = f"step with {many} tables / with {few}"
    return Table("", ("system", *(report.with_allocator(ratio, a) for a in allocators)), rows)


def headline(workloads: Sequence[WorkloadFigures]) -> Table:
    """Shows speed and bytes in a few lines, with all allocators side by side."""
    allocators = report.allocators_of(workloads)
    ratios = ("best stock sharding", "its step / fused step")
    rows = []
    for group in side_by_side(workloads):
        w = next(iter(group.values()))
        assert w.fused is not None and w.best_stock is not None
        cells = []
        for allocator in allocators:
            found = group.get(allocator)
            best = found.best_stock.name if found and found.best_stock else ""
            cells += [best, str(found.speed_up) if found else ""]
        rows.append(
            (
                w.config.link or "loopback",
                ", ".join(map(str, w.config.dims)),
                str(w.config.batch_size),
                *cells,
                f"{w.best_stock.bytes_sent / w.fused.bytes_sent:.1f}",
            )
        )
    return Table(
        "",
        (
            "link",
            "columns",
            "batch per rank",
            *(report.with_allocator(name, a) for a in allocators for name in ratios),
            "its bytes / fused",
        ),
        rows,
    )


def first_page(workloads: Sequence[WorkloadFigures]) -> Table:
    """Shows the speed and bytes of a few workloads, for the README.

    They are those of 64 columns on loopback and at 1 Gbit/s, with batches of 1024 samples and more.
    """
    shown = [
        w
        for w in workloads
        if w.config.dims == [64] and w.config.batch_size >= 1024 and w.config.link in ("", "1gbit")
    ]
    allocators = report.allocators_of(shown)
    rows = []
    for group in side_by_side(shown):
        w = next(iter(group.values()))
        assert w.fused is not None and w.best_stock is not None
        cells = []
        for allocator in allocators:
            found = group.get(allocator)
            best = found.best_stock if found else None
            cells.append(f"{found.speed_up}, {best.name}" if found and best else "")
        rows.append(
            (
                f"{w.config.series}, {w.config.link or 'loopback'}, {w.config.batch_size}",
                *cells,
                f"{w.best_stock.bytes_sent / w.fused.bytes_sent:.1f}",
            )
        )
    times = (report.with_allocator("step time: stock / fused", a) for a in allocators)
    return Table("", ("ids, link, samples per rank", *times, "bytes: stock / fused"), rows)


def inverse(ratio: Ratio) -> str:
    """Returns a ratio the other way round."""
    return f"{1 / ratio.median:.2f} [{1 / ratio.high:.2f}, {1 / ratio.low:.2f}]"


def hot_speeds(workloads: Sequence[WorkloadFigures]) -> Table:
    """Shows the fused step in units of the steps with hot rows, by how often these are synced."""
    rows: list[tuple[str, ...]] = []
    for w in workloads:
        ratios = {}
        for name, system in w.systems.items():
            if name.startswith("fused_hot"):
                assert system.against_fused is not None
                ratios[name.endswith("every_8")] = inverse(system.against_fused)
        rows.append((w.title, ratios.get(False, ""), ratios.get(True, "")))
    return Table("", ("fused step / step with", "a sync every step", "every eighth step"), rows)


def hot_steps(workloads: Sequence[WorkloadFigures]) -> Table:
    """Shows time, messages and bytes of a step, for all systems."""
    names = list(dict.fromkeys(name for w in workloads for name in w.systems))
    rows = []
    for w in workloads:
        cells = []
        for name in names:
            system = w.systems.get(name)
            if system is None:
                cells.append("")
                continue
            ratio = "1" if name == "fused_row_wise" else str(system.against_fused)
            sent = human_bytes(system.bytes_sent)
            cells.append(f"{system.milliseconds:.1f} ms, {ratio}, {system.collectives:g}, {sent}")
        rows.append((w.title, *cells))
    return Table("", ("", *names), rows)


def owners(workloads: Sequence[WorkloadFigures]) -> Table:
    """Shows how evenly owners are asked; links do not matter."""
    rows = [
        (w.title.replace(", loopback", ""), *(f"{value:.3f}" for value in w.imbalance.values()))
        for w in workloads
        if not w.config.link and w.config.batches == "all" and "row_wise" in w.systems
    ]
    return Table("", ("", "row_wise", "fused_row_wise", "with hot rows"), rows)


def hits(workloads: Sequence[WorkloadFigures]) -> Table:
    """Shows hit rates; neither links nor the number of ranks matter much."""
    chosen = [
        w
        for w in workloads
        if not w.config.link and "row_wise" in w.systems and w.config.ranks == 2
    ]
    rows = [
        (str(size), *("{:.1%}, {:.1%}".format(*w.hits[size]) for w in chosen))
        for size in chosen[0].hits
    ]
    titles = (w.title.replace(", loopback, ranks 2", "") for w in chosen)
    return Table("", ("hot rows", *titles), rows)


TABLES: dict[str, Callable[[Sequence[WorkloadFigures]], Table]] = {
    "headline": headline,
    "first_page": first_page,
    "outcomes": outcomes,
    "where_stock_wins": where_stock_wins,
    "costs": costs,
    "who_pools": who_pools,
    "more_tables": more_tables,
    "traffic": report.traffic,
    "speeds": report.speeds,
    "wire": report.wire,
    "bounds": report.bounds,
    "phases": report.phases,
    "memory": report.memory,
    "codecs": report.codecs,
    "hot_speeds": hot_speeds,
    "hot_steps": hot_steps,
    "owners": owners,
    "hits": hits,
}


def fill(text: str) -> str:
    """Returns the text with tables between marks like `<!-- speeds of targets -->` made anew."""

    def table(match: re.Match[str]) -> str:
        begin, kind, suites, end = match.groups()
        workloads = [w for suite in suites.split(" and ") for w in figures_of(suite)]
        return f"{begin}\n{TABLES[kind](workloads).markdown()}\n\n{end}"

    return MARK.sub(table, text)


def main() -> None:
    for page in PAGES:
        page.write_text(fill(page.read_text()))
    for suite, names in PLOTS.items():
        if not (MEASURED / suite / RESULTS).is_file():
            print(f"no plots of {suite}, which was not measured")
            continue
        with tempfile.TemporaryDirectory() as folder:
            draw(figures_of(suite), Path(folder))
            for name in names:
                target = DOCS / "figures" / f"performance_{suite}_{name}.png"
                target.write_bytes((Path(folder) / f"{name}.png").read_bytes())


if __name__ == "__main__":
    main()
