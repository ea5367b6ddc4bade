"""2D sparse parallelism (Meta, 2025): scaling with groups, simulated, and its bytes, measured."""

from pathlib import Path

from paper_results import NOTHING, Results, side_by_side

from fusedrec_torchrec.bench.report import Table
from fusedrec_torchrec.planner.simulate import Point

__all__ = ["tables"]

MEASURED = Path(__file__).parents[1] / "docs" / "2d.md"
SYSTEMS = ("TorchRec", "fused", "fused + 2D")
RANKS = (256, 1024, 2048, 4096)
PAPER = {1024: "96 %", 2048: "95 %", 4096: "90 %"}


def _points(results: Results) -> dict[str, list[Point]] | None:
    found = {s: [results.point("groups", s, ranks) for ranks in RANKS] for s in SYSTEMS}
    if any(point is None for points in found.values() for point in points):
        return None
    return {s: [p for p in points if p is not None] for s, points in found.items()}


def _efficiency(point: Point, first: Point) -> float:
    """Returns what a rank does of what it did in the smallest cluster."""
    return point.throughput / point.ranks / (first.throughput / first.ranks)


def _scaling(found: dict[str, list[Point]]) -> str:
    rows: list[tuple[str, ...]] = []
    for number, ranks in enumerate(RANKS):
        cells = []
        for points in found.values():
            point = points[number]
            share = _efficiency(point, points[0])
            cells.append(
                f"{point.throughput / 1e6:.2f} M, {share:.0%}, {point.busiest:.2f}"
                if point.seconds
                else "does not fit"
            )
        rows.append((str(ranks), *cells, found[SYSTEMS[-1]][number].how))
    return Table("", ("GPUs", *SYSTEMS, "groups"), rows).markdown()


def _bytes() -> str:
    """Returns the bytes that docs/2d.md has."""
    return MEASURED.read_text().split("<!-- bytes -->")[1].split("<!-- end of bytes -->")[0].strip()


def tables(results: Results) -> dict[str, str]:
    """Returns the tables of the section, by marker."""
    made = {"2d bytes": _bytes()}
    found = _points(results)
    if found is None:
        return made
    ours, stock = found[SYSTEMS[-1]], found[SYSTEMS[0]]
    rows = [
        (
            f"weak scaling from 256 to {ranks} GPUs",
            PAPER[ranks],
            NOTHING,
            f"{_efficiency(ours[n], ours[0]):.0%}; TorchRec {_efficiency(stock[n], stock[0]):.0%}",
        )
        for n, ranks in enumerate(RANKS)
        if ranks in PAPER
    ]
    rows += [
        (
            "throughput on 256 GPUs, groups / one group",
            "1.74x (1.53 to 2.66 M samples/s)",
            NOTHING,
            f"{ours[0].throughput / found['fused'][0].throughput:.2f}x over one fused group; "
            f"{ours[0].throughput / stock[0].throughput:.2f}x over TorchRec",
        ),
        (
            "busiest rank / mean on 256 GPUs",
            "5.70, with groups 1.57",
            NOTHING,
            f"TorchRec {stock[0].busiest:.2f}, fused with groups {ours[0].busiest:.2f}",
        ),
    ]
    return {**made, "2d scaling": _scaling(found), "2d side by side": side_by_side(rows)}
