"""FusedRec (AAAI 2026): dedup by category in many messages, and all categories in one exchange."""

from collections.abc import Callable
from pathlib import Path

from paper_results import NOTHING, Results, side_by_side

from fusedrec_torchrec.bench.figures import WorkloadFigures
from fusedrec_torchrec.bench.fusion import Fusion
from fusedrec_torchrec.bench.report import fusion
from fusedrec_torchrec.bench.statistics import Ratio

__all__ = ["draw", "tables"]

FIGURE = "![Fused, in units of dedup table by table](figures/papers_fusedrec.png)"
SERIES = ("FusedRec, Criteo", "FusedRec, 200 tables")


def _range(values: list[float], unit: str = "x") -> str:
    low, high = f"{min(values):.2f}", f"{max(values):.2f}"
    return f"{low}{unit}" if low == high else f"{low} to {high}{unit}"


def _by_link(workloads: list[WorkloadFigures], value: Callable[[Fusion], Ratio | None]) -> str:
    """Returns the smallest and the largest median on each link."""
    texts = []
    for link in dict.fromkeys(w.config.link for w in workloads):
        ratios = [value(Fusion(w)) for w in workloads if w.config.link == link]
        medians = [ratio.median for ratio in ratios if ratio is not None]
        texts.append(f"{link or 'loopback'} {_range(medians)}")
    return "; ".join(texts)


def _simulated(results: Results, slower: str, ranks: int) -> str:
    points = [results.point("fusedrec", system, ranks) for system in (slower, "fused")]
    if any(point is None for point in points):
        return NOTHING
    there, ours = (point.throughput for point in points if point is not None)
    return f"{ours / there:.2f}x on {ranks} GPUs"


def _scaling(results: Results) -> str:
    points = [results.point("fusedrec", "fused", ranks) for ranks in (8, 128)]
    if any(point is None for point in points):
        return NOTHING
    shares = [point.throughput / point.ranks for point in points if point is not None]
    return f"{shares[1] / shares[0]:.2f}, of one node"


def tables(results: Results) -> dict[str, str]:
    """Returns the tables of the section, by marker."""
    workloads = [w for name in SERIES for w in results.workloads(name) if Fusion.measured(w)]
    if not workloads:
        return {}
    found = [Fusion(w) for w in workloads]
    rounds = [f.apart.rounds / f.fused.rounds for f in found]
    small = [f"{100 * m.small:.0f} %" for m in (found[0].apart, found[0].fused)]
    rows = [
        (
            "rounds of all-to-all, dedup by category / fused",
            "11.4x",
            _range(rounds).replace(".00", ""),
            NOTHING,
        ),
        (
            "messages under 64 KB",
            "most, by category",
            f"{small[0]} by table, {small[1]} fused ({workloads[0].title})",
            NOTHING,
        ),
        (
            "bandwidth that messages reach, fused / by category",
            "5.66x",
            _by_link(workloads, lambda f: f.bandwidth),
            NOTHING,
        ),
        (
            "throughput, fused / dedup by category",
            "1.38x in the mean",
            _by_link(workloads, lambda f: f.speed_up),
            f"{_simulated(results, 'dedup by table', 128)}, one table after the other",
        ),
        (
            "throughput, fused / an exchange without dedup",
            "1.17x",
            _by_link(workloads, lambda f: f.no_dedup),
            _simulated(results, "TorchRec", 128),
        ),
        ("scaling efficiency to 128 GPUs", "0.93", NOTHING, _scaling(results)),
    ]
    return {
        "fusedrec side by side": side_by_side(rows),
        "fusedrec messages": f"{fusion(workloads).markdown()}\n\n{FIGURE}",
    }


def draw(results: Results, path: Path) -> bool:
    """Draws bandwidth and speed-up of all workloads; returns whether there are any."""
    workloads = [w for name in SERIES for w in results.workloads(name) if Fusion.measured(w)]
    if not workloads:
        return False
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(9, 1.6 + 0.6 * len(workloads)), layout="constrained")
    bars = ("messages alone: bandwidth", "tab:blue"), ("a whole step", "tab:green")
    for y, w in enumerate(workloads):
        found = Fusion(w)
        for k, (ratio, (label, color)) in enumerate(
            zip((found.bandwidth, found.speed_up), bars, strict=True)
        ):
            error = [[ratio.median - ratio.low], [ratio.high - ratio.median]]
            axes.barh(
                *(y + 0.4 * k - 0.2, ratio.median, 0.36),
                color=color,
                xerr=error,
                ecolor="0.3",
                capsize=3,
                label=None if y else label,
            )
            axes.text(ratio.high, y + 0.4 * k - 0.2, f"  {ratio.median:.2f}x", va="center")
    axes.axvline(1, color="black", linewidth=1)
    axes.set_yticks(range(len(workloads)), [w.title for w in workloads])
    axes.invert_yaxis()
    axes.margins(x=0.15)
    axes.set_xlim(left=0)
    axes.set_xlabel("fused, in units of dedup table by table (line: 95 % interval)")
    axes.legend()
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
    return True
