"""A table of how systems scale."""

from collections.abc import Sequence

from fusedrec_torchrec.core.terminal import human_bytes, print_table
from fusedrec_torchrec.planner.config import Scaling
from fusedrec_torchrec.planner.simulate import Point

__all__ = ["print_scaling"]


def print_scaling(scaling: Scaling, points: Sequence[Point]) -> None:
    """Prints the points of weak or of strong scaling; efficiency is that of a system's first."""
    first: dict[str, Point] = {}
    rows = []
    for point in points:
        base = first.setdefault(point.system, point) if point.seconds else None
        efficiency = None
        if base is not None:
            efficiency = point.throughput / base.throughput * base.ranks / point.ranks
        rows.append(
            (
                point.ranks,
                point.system,
                "-" if point.seconds is None else f"{1e3 * point.seconds:.2f}",
                f"{point.throughput:,.0f}" if point.seconds else "-",
                "-" if efficiency is None else f"{efficiency:.2f}",
                human_bytes(point.bytes_sent) if point.seconds else "-",
                f"{point.busiest:.2f}",
                point.how,
            )
        )
    print_table(
        f"{scaling} scaling, {points[0].batch} samples a rank"
        + ("" if scaling == "weak" else " to begin with"),
        (
            *("ranks", "system", "ms a step", "samples a second", "efficiency"),
            *("a rank sends", "busiest owner", "how"),
        ),
        rows,
    )
