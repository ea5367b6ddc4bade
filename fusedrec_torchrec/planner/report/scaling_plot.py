"""Throughput and efficiency of simulated systems over the size of a cluster."""

from collections.abc import Sequence
from pathlib import Path

from fusedrec_torchrec.planner.simulate import SYSTEMS, Point

__all__ = ["draw_scaling"]

COLORS = dict(
    zip(SYSTEMS, ("#9aa0a6", "#0f9d58", "#f4b400", "#4285f4", "#db4437", "#ab47bc"), strict=True)
)


def draw_scaling(path: Path, points: Sequence[Point], title: str) -> None:
    """Draws throughput, and how much of it a rank keeps as the cluster grows."""
    from matplotlib.figure import Figure

    scalings = list(dict.fromkeys(point.scaling for point in points))
    figure = Figure(figsize=(11, 4.2 * len(scalings)), layout="constrained")
    axes = figure.subplots(len(scalings), 2, squeeze=False)
    figure.suptitle(title)
    for (left, right), scaling in zip(axes, scalings, strict=True):
        for system, color in COLORS.items():
            line = [p for p in points if (p.system, p.scaling) == (system, scaling) and p.seconds]
            if not line:
                continue
            ranks = [point.ranks for point in line]
            base = line[0].throughput / line[0].ranks
            style = {"color": color, "marker": "o", "markersize": 4, "label": system}
            style["linestyle"] = "--" if system == "fused + hot rows" else "-"  # often on fused
            left.plot(ranks, [point.throughput for point in line], **style)
            right.plot(ranks, [p.throughput / p.ranks / base for p in line], **style)
        left.set(xscale="log", yscale="log", ylabel="samples a second", title=f"{scaling} scaling")
        right.set(xscale="log", ylim=(0, 1.08), ylabel="throughput of a rank, to its smallest")
        for axis in (left, right):
            axis.set_xlabel("ranks")
            sizes = sorted({point.ranks for point in points})
            axis.set_xticks(sizes, [str(size) for size in sizes], rotation=45)
            axis.minorticks_off()
            axis.grid(alpha=0.25)
    axes[0][0].legend(frameon=False)
    figure.savefig(path, dpi=120)
