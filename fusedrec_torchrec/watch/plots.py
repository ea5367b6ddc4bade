"""Draws curves and bars with letters: Braille patterns have eight dots in the place of one."""

import math
from collections.abc import Sequence
from itertools import pairwise

from rich.text import Text

from fusedrec_torchrec.core.terminal import human_bytes
from fusedrec_torchrec.watch.panels import Shown

__all__ = ["bar", "curves", "written"]

EMPTY = 0x2800  # the Braille pattern without dots
DOTS = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))  # by row and column of a cell
EIGHTHS = " ▏▎▍▌▋▊▉"
Curve = tuple[Sequence[tuple[float, float]], str, bool]
"""Points, a style of rich, and whether they are joined by a line."""


def curves(drawn: Sequence[Curve], width: int, height: int, from_zero: bool = False) -> Text:
    """Returns curves in one plot of so many letters and lines; the last one lies on top."""
    points = [point for of_curve, _, _ in drawn for point in of_curve]
    if not points:
        return Text("\n" * (height - 1))
    left, right = min(x for x, _ in points), max(x for x, _ in points)
    low = 0.0 if from_zero else min(y for _, y in points)
    high = max(y for _, y in points)
    columns, rows = 2 * width, 4 * height
    cells: dict[tuple[int, int], tuple[int, str]] = {}

    def dot(x: float, y: float, style: str) -> None:
        column = round(x * (columns - 1))
        row = round((1 - y) * (rows - 1))
        place = row // 4, column // 2
        before, _ = cells.get(place, (0, ""))
        cells[place] = before | DOTS[row % 4][column % 2], style

    for of_curve, style, joined in drawn:
        scaled = [
            (
                (x - left) / (right - left) if right > left else 0.5,
                (y - low) / (high - low) if high > low else 0.5,
            )
            for x, y in of_curve
        ]
        for x, y in scaled:
            dot(x, y, style)
        if not joined:
            continue
        for (x1, y1), (x2, y2) in pairwise(scaled):
            parts = math.ceil(max(abs(x2 - x1) * columns, abs(y2 - y1) * rows, 1))
            for part in range(1, parts):
                share = part / parts
                dot(x1 + share * (x2 - x1), y1 + share * (y2 - y1), style)
    text = Text()
    for row in range(height):
        for column in range(width):
            dots, style = cells.get((row, column), (0, ""))
            text.append(chr(EMPTY + dots) if dots else " ", style)
        if row < height - 1:
            text.append("\n")
    return text


def bar(share: float, width: int) -> str:
    """Returns a share of so many letters, in eighths of one; something is never nothing."""
    eighths = round(8 * width * min(max(share, 0.0), 1.0)) or int(share > 0)
    full, part = divmod(eighths, 8)
    return ("█" * full + (EIGHTHS[part] if part else "")).ljust(width)


def written(value: float | None, shown: Shown) -> str:
    """Returns a value as a panel writes it."""
    if value is None:
        return "-"
    if shown == "percent":
        return f"{100 * value:.1f} %"
    if shown == "bytes":
        return human_bytes(value)
    if shown == "count":
        return f"{value:,.0f}"
    return f"{value:.4g}" if abs(value) < 1e-2 or abs(value) >= 100 else f"{value:.4f}"
