"""Writes the tables and plots of docs/performance.md, hot-rows.md, compression.md and README.

    python docs/performance.py

The measurements are in benchmarks/results, from `make performance DATA=train.txt.gz`.
"""

import re
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

from fusedrec_torchrec.bench import report
from fusedrec_torchrec.bench.figures import WorkloadFigures, side_by_side
from fusedrec_torchrec.bench.plots import draw
from fusedrec_torchrec.bench.report import Table
from fusedrec_torchrec.bench.results import RESULTS, load_results
from fusedrec_torchrec.bench.statistics import Ratio
from fusedrec_torchrec.bench.suite import FUSED_PLANNER, FUSED_PROFILED, OURS
from fusedrec_torchrec.core.terminal import human_bytes
from fusedrec_torchrec.sharding.sharding_type import FUSED_TYPES

DOCS = Path(__file__).parent
MEASURED = DOCS.parent / "benchmarks" / "results"
MARK = re.compile(r"(<!-- (?!end)(\w+) of ([\w ]+) -->\n).*?(<!-- end -->)", re.DOTALL)
PAGES = (
    DOCS / "performance.md",
    DOCS / "hot-rows.md",
    DOCS / "compression.md",
    DOCS.parent / "README.md",
)
PLOTS = {
    "targets": ("breakdown", "bytes"),
    "links": ("speed_up",),
    "workloads": ("speed_up",),
    "growth": ("growth",),
    "mlperf": ("speed_up", "bytes"),
    "hot": ("hit_rates",),
}


def figures_of(suite: str) -> list[WorkloadFigures]:
    """Returns the figures of all workloads that a suite has measured."""
    document = load_results(MEASURED / suite / RESULTS)
    return [WorkloadFigures(result) for result in document["results"]]


class Targets:
    """Lines of a table of targets, what was measured, and whether that is enough."""

    def __init__(self) -> None:
        self.rows: list[tuple[str, ...]] = []

    def line(self, what: str, target: str, measured: str, met: bool) -> None:
        """Adds a line."""
        self.rows.append((what, target, measured, "yes" if met else "**no**"))

    def ratio(self, what: str, least: float, value: Ratio | None) -> None:
        """Adds a line for a ratio that should be at least so much."""
        assert value is not None
        self.line(what, f">= {least}", str(value), value.median >= least)

    def table(self) -> Table:
        """Returns the lines as a table."""
        return Table("", ("", "target", "measured", "met"), self.rows)


def criteo(
    workloads: Sequence[WorkloadFigures],
    batch_size: int,
    link: str = "",
    allocator: str = "default",
) -> WorkloadFigures:
    """Returns a workload of the suites targets and links; growth has the same batches, too."""
    wanted = ("Criteo", batch_size, link, allocator)
    for w in workloads:
        if (w.config.series, w.config.batch_size, w.config.link, w.allocator) == wanted:
            return w
    raise SystemExit(f"no results for Criteo ids, batch {batch_size}, link {link or 'loopback'}")


def summary(workloads: Sequence[WorkloadFigures]) -> Table:
    """Shows targets, what was measured, and whether that is enough."""
    by_title = {w.label: w for w in workloads}
    targets = Targets()
    line, ratio = targets.line, targets.ratio
    small, large = criteo(workloads, 2048), criteo(workloads, 8192)
    ratio("loopback, batch 2048: best stock / fused", 2.5, small.speed_up)
    ratio("loopback, batch 8192: best stock / fused", 3.0, large.speed_up)
    for batch in (2048, 8192):
        w = criteo(workloads, batch, "1gbit")
        ratio(f"1 Gbit/s, batch {batch}: best stock / fused", 3.5, w.speed_up)
    if any(w.allocator == "keep" for w in workloads):
        for batch, least in ((2048, 4.0), (8192, 5.0)):
            w = criteo(workloads, batch, allocator="keep")
            ratio(f"loopback, batch {batch}, memory kept: best stock / fused", least, w.speed_up)
    both = (small, large)
    rows_share = max(w.row_bytes / w.least_row_bytes for w in both)
    line("bytes of rows / lower bound", "<= 1.00", f"{rows_share:.4f}", rows_share <= 1)
    ids_share = max(w.id_bytes / w.row_bytes for w in both)
    line("ids and headers / rows", "<= 5 %", f"{ids_share:.2%}", ids_share <= 0.05)
    collectives = max(w.fused.collectives for w in both if w.fused is not None)
    line("collectives in a step", "3", f"{collectives:g}", collectives == 3)
    for w, title in ((small, "loopback, batch 2048"), (large, "loopback, batch 8192")):
        ratio(f"efficiency, {title}", 0.7, w.efficiency)
    for batch in (2048, 8192):
        w = criteo(workloads, batch, "1gbit")
        ratio(f"efficiency, 1 Gbit/s, batch {batch}", 0.7, w.efficiency)
    few, many = by_title["26 tables"], by_title["1000 tables"]
    assert few.fused is not None and many.fused is not None
    growth = many.fused.milliseconds / few.fused.milliseconds
    stock = many.systems["table_wise"].milliseconds / few.systems["table_wise"].milliseconds
    line(
        "1000 tables against 26, as many ids: the step grows",
        "<= 1.3x",
        f"{growth:.2f}x (table_wise: {stock:.2f}x)",
        growth <= 1.3,
    )
    wrong = [
        w
        for w in workloads
        if w.advice not in (*OURS, "") and set(FUSED_TYPES) & set(w.planner_picks)
    ]
    line(
        "workloads where fused is over 5 % slower and the planner picks it",
        "0",
        str(len(wrong)),
        not wrong,
    )
    return targets.table()


def pooling_targets(workloads: Sequence[WorkloadFigures]) -> Table:
    """Shows targets of pooling where it costs least, for every allocator that was measured."""
    targets = Targets()
    mlperf = [w for w in workloads if w.config.multi_hot == "mlperf"]
    for w in mlperf:
        if w.config.batch_size in (1024, 8192):
            least = 2.5 if w.config.link else 2.0
            targets.ratio(f"{w.label}: best stock / fused", least, w.speed_up)
            if FUSED_PROFILED in w.systems:
                what = f"{w.label}, with a profile: best stock / fused"
                targets.ratio(what, least, w.speed_up_of(FUSED_PROFILED))
    found = [w.fused for w in workloads if w.fused is not None]
    for system, told in ((FUSED_PLANNER, ""), (FUSED_PROFILED, ", with a profile")):
        shares = [w.systems[system].rows_over_least for w in mlperf if system in w.systems]
        share = max((share for share in shares if share is not None), default=0.0)
        if share:
            what = "rows, own ones included / sum of min(distinct bags, distinct rows)"
            targets.line(f"MLPerf{told}: {what}", "1.00", f"{share:.3f}", share <= 1.005)
    others = [w for w in workloads if w not in mlperf and w.speed_up is not None]
    worst = min(others, key=lambda w: w.speed_up.median if w.speed_up else 0.0)
    targets.ratio(f"least of the crossover ({worst.label})", 1.0, worst.speed_up)
    most = max(system.collectives for system in found)
    targets.line("collectives in a step, any mix", "3", f"{most:g}", most == 3)
    return targets.table()


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


def hot_targets(workloads: Sequence[WorkloadFigures]) -> Table:
    """Shows targets of hot rows, what was measured, and whether that is enough."""
    rows: list[tuple[str, ...]] = []
    steep = [w for w in workloads if w.config.zipf == 1.3 and w.config.series == "Zipf"]
    for ranks in (2, 4):
        w = next(w for w in steep if w.config.ranks == ranks)
        plain, fused, hot = w.imbalance.values()
        met = "yes" if hot <= 1.1 else "**no**"
        measured = f"{hot:.3f} (row_wise {plain:.2f}, fused {fused:.3f})"
        rows.append((f"Zipf 1.3, {ranks} ranks: most asked owner / mean", "<= 1.1", measured, met))
    for w in workloads:
        if w.config.batches == "hot" and w.config.link:
            for name in ("fused_hot_batches", "fused_hot_batches_every_8"):
                ratio = w.systems[name].against_fused
                assert ratio is not None
                speed = f"{1 / ratio.median:.2f} [{1 / ratio.high:.2f}, {1 / ratio.low:.2f}]"
                what = f"{w.title}: fused step / {name} step"
                met = "yes" if ratio.median <= 0.5 else "**no**"
                rows.append((what, ">= 2", speed, met))
    for w in workloads:
        if w.config.batches == "all" and not w.config.link and w.config.hot_rows == 2000:
            ratio = w.systems["fused_hot"].against_fused
            assert ratio is not None
            met = "yes" if ratio.median <= 1.03 else "**no**"
            rows.append((f"{w.title}: fused_hot step / fused step", "<= 1.03", str(ratio), met))
    return Table("", ("", "target", "measured", "met"), rows)


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
    "summary": summary,
    "headline": headline,
    "first_page": first_page,
    "pooling_targets": pooling_targets,
    "traffic": report.traffic,
    "speeds": report.speeds,
    "wire": report.wire,
    "bounds": report.bounds,
    "phases": report.phases,
    "crossover": report.crossover,
    "memory": report.memory,
    "codecs": report.codecs,
    "hot_targets": hot_targets,
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
