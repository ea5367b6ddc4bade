"""Draws plots of a benchmark's figures."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fusedrec_torchrec.bench.allocators import Allocator
from fusedrec_torchrec.bench.figures import ALLOCATOR_TITLES, WorkloadFigures, side_by_side
from fusedrec_torchrec.bench.suite import FUSED_PLANNER, OURS
from fusedrec_torchrec.sharding.sharding_type import FUSED

__all__ = ["COLORS", "draw"]

COLORS: dict[str, str] = {
    "table_wise": "tab:blue",
    "row_wise": "tab:orange",
    "column_wise": "tab:purple",
    "table_row_wise": "tab:brown",
    "planner": "tab:gray",
    "data_parallel": "tab:olive",
    "dedup_per_table": "goldenrod",
    "fused_row_wise": "tab:green",
    "fused_table_wise": "mediumseagreen",
    "fused_column_wise": "darkseagreen",
    "fused_mixed": "olivedrab",
    "fused_planner": "darkgreen",
    "fused_profiled": "limegreen",
    "fused_hot": "tab:red",
    "fused_hot_every_8": "lightcoral",
    "fused_hot_batches": "darkred",
    "fused_hot_batches_every_8": "tab:pink",
    "fused_fp16": "yellowgreen",
    "fused_bf16": "tab:cyan",
    "fused_int8": "darkcyan",
    "fused_dct": "black",
}
LINES: dict[Allocator, str] = {"default": "-", "keep": "--", "jemalloc": ":"}


def draw(workloads: Sequence[WorkloadFigures], folder: Path) -> list[Path]:
    """Draws every plot that the figures have something for; returns the files."""
    import matplotlib

    matplotlib.use("Agg")
    compared = [w for w in workloads if w.speed_up is not None]
    with_fused = [w for w in workloads if w.fused is not None]
    series: dict[str, list[WorkloadFigures]] = {}
    for w in workloads:
        if len(w.config.sweep) == 1 and _is_number(_swept(w)):
            series.setdefault(w.config.series, []).append(w)
    series = {name: sorted(ws, key=_swept) for name, ws in series.items() if len(ws) > 1}
    files = []
    if compared:
        files.append(_speed_ups(compared, folder / "speed_up.png"))
    if any(w.phases for w in with_fused):
        files.append(_breakdown([w for w in with_fused if w.phases], folder / "breakdown.png"))
    if with_fused:
        first = [next(iter(group.values())) for group in side_by_side(with_fused)]
        files.append(_bytes(first, folder / "bytes.png"))  # which no allocator changes
    if any(w.hits for w in workloads):
        files.append(_hit_rates([w for w in workloads if w.hits], folder / "hit_rates.png"))
    if series:
        files.append(_growth(series, folder / "growth.png"))
    return files


def _swept(w: WorkloadFigures) -> Any:
    return next(iter(w.config.sweep.values()))[0]


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float)


def _figure(rows: int, inches_per_row: float = 0.42) -> tuple[Any, Any]:
    from matplotlib import pyplot

    return pyplot.subplots(figsize=(9, 1.6 + inches_per_row * rows), layout="constrained")


def _save(figure: Any, path: Path) -> Path:
    from matplotlib import pyplot

    figure.savefig(path, dpi=110)
    pyplot.close(figure)
    return path


def _plain_numbers(axis: Any) -> None:
    """Labels a logarithmic axis with 20, 50, 100 instead of powers of ten."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

    axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axis.set_minor_locator(NullLocator())
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))


def _speed_ups(workloads: Sequence[WorkloadFigures], path: Path) -> Path:
    figure, axes = _figure(len(workloads))
    for y, w in enumerate(workloads):
        ratio = w.speed_up
        assert ratio is not None and w.best_stock is not None
        error = [[ratio.median - ratio.low], [ratio.high - ratio.median]]
        color = "tab:green" if w.advice in OURS else "tab:red"
        hatch = None if w.allocator == "default" else "//"
        axes.barh(y, ratio.median, color=color, hatch=hatch, xerr=error, ecolor="0.3", capsize=3)
        axes.text(ratio.high, y, f"  {ratio.median:.2f}x {w.best_stock.name}", va="center")
    axes.axvline(1, color="black", linewidth=1)
    axes.set_yticks(range(len(workloads)), [w.label for w in workloads])
    axes.invert_yaxis()
    axes.margins(x=0.3)
    axes.set_xlim(left=0)
    axes.set_xlabel("step of the best stock sharding / fused step (line: 95 % interval)")
    return _save(figure, path)


def _hit_rates(workloads: Sequence[WorkloadFigures], path: Path) -> Path:
    """Draws hit rates over the size of the hot set; workloads that differ in links only are one."""
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4.2), layout="constrained")
    seen: dict[tuple[tuple[float, float], ...], str] = {}
    for w in workloads:
        seen.setdefault(tuple(w.hits.values()), w.title)
    sizes = list(workloads[0].hits)
    for values, title in seen.items():
        (line,) = axes.plot(sizes, [100 * rows for rows, _ in values], marker=".", label=title)
        axes.plot(
            sizes, [100 * ids for _, ids in values], "--", color=line.get_color(), linewidth=1
        )
    axes.set_xscale("log")
    axes.set_xlabel("hot rows")
    axes.set_ylabel("hot, % of a batch's rows (dashed: of its ids)")
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
    return _save(figure, path)


def _breakdown(workloads: Sequence[WorkloadFigures], path: Path) -> Path:
    from matplotlib import colormaps

    figure, axes = _figure(2 * len(workloads))
    stages = [name for name in workloads[0].phases if name != "step"]
    colors = {name: colormaps["tab20"](i % 20) for i, name in enumerate(stages)}
    bound_colors = {"exchange": "0.35", "lookup": "0.55", "gather": "0.75"}
    for i, w in enumerate(workloads):
        left = 0.0
        for name in stages:
            value = max(w.phases[name], 0.0)
            axes.barh(2 * i, value, left=left, color=colors[name], label=None if i else name)
            left += value
        left = 0.0
        for name, times in w.bound_seconds.items():
            value = 1e3 * sorted(times)[len(times) // 2]
            label = None if i else f"bound: {name}"
            axes.barh(
                2 * i + 0.8, value, left=left, height=0.5, color=bound_colors[name], label=label
            )
            left += value
    axes.set_yticks([2 * i for i in range(len(workloads))], [w.label for w in workloads])
    axes.invert_yaxis()
    axes.set_xlabel("milliseconds of the fused step, by stage; grey: its lower bounds")
    figure.legend(loc="outside lower center", ncols=5, fontsize="small")
    figure.set_figheight(figure.get_figheight() + 0.8)
    return _save(figure, path)


def _bytes(workloads: Sequence[WorkloadFigures], path: Path) -> Path:
    figure, axes = _figure(sum(len(w.systems) + 1 for w in workloads), 0.2)
    y, middles, shown = 0, [], set()
    for w in workloads:
        first = y
        for name, system in w.systems.items():
            label = None if name in shown else name
            axes.barh(y, system.bytes_sent / 2**20, height=1, color=COLORS[name], label=label)
            shown.add(name)
            y += 1
        least = w.least_row_bytes / 2**20
        axes.plot([least, least], [first - 0.5, y - 0.5], color="black")
        middles.append((first + y - 1) / 2)
        y += 1
    axes.plot([], [], color="black", label="lower bound: unique remote rows, and back")
    axes.set_yticks(middles, [w.title for w in workloads])
    axes.invert_yaxis()
    axes.set_xscale("log")
    _plain_numbers(axes.xaxis)
    axes.set_xlabel("MiB on the wire in a step, all ranks (ideal collectives)")
    figure.legend(loc="outside lower center", ncols=4, fontsize="small")
    figure.set_figheight(figure.get_figheight() + 0.6)
    return _save(figure, path)


def _line_names(system: str, allocator: Allocator) -> tuple[str, str]:
    return system, ALLOCATOR_TITLES[allocator]


def _growth(series: dict[str, list[WorkloadFigures]], path: Path) -> Path:
    from matplotlib import pyplot

    figure, grid = pyplot.subplots(
        2, len(series), figsize=(1 + 3.6 * len(series), 6.4), layout="constrained", squeeze=False
    )
    handles: dict[str, Any] = {}
    for column, (title, workloads) in enumerate(series.items()):
        field = next(iter(workloads[0].config.sweep))
        names = list(dict.fromkeys(name for w in workloads for name in w.systems))
        for axes, what in zip(grid[:, column], ("milliseconds", "bytes_sent"), strict=True):
            kinds = dict.fromkeys((name, w.allocator) for name in names for w in workloads)
            for name, allocator in kinds:
                own = [w for w in workloads if name in w.systems and w.allocator == allocator]
                values = [getattr(w.systems[name], what) for w in own]
                if what == "bytes_sent":
                    values = [value / 2**20 for value in values]
                (line,) = axes.plot(
                    [_swept(w) for w in own],
                    values,
                    LINES[allocator],
                    marker="o",
                    markersize=3,
                    linewidth=2.5 if name in (FUSED, FUSED_PLANNER) else 1.2,
                    color=COLORS[name],
                )
                handles.setdefault(", ".join(filter(None, _line_names(name, allocator))), line)
            axes.set_xscale("log", base=2)
            axes.set_yscale("log")
            _plain_numbers(axes.yaxis)
            axes.set_xticks([_swept(w) for w in workloads], [str(_swept(w)) for w in workloads])
            axes.xaxis.minorticks_off()
            axes.grid(alpha=0.3)
            axes.set_xlabel(field)
        grid[0, column].set_title(title, fontsize="medium")
    grid[0, 0].set_ylabel("milliseconds of a step")
    grid[1, 0].set_ylabel("MiB on the wire")
    figure.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=4)
    return _save(figure, path)
