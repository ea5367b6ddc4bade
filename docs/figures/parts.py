"""Draws docs/figures/parts.svg, the parts of the package and who imports whom (`make figures`).

The imports are read from the files of the package, the order of the parts from the page.
"""

import ast
import re
import sys
from pathlib import Path

import matplotlib as mpl
from matplotlib.figure import Figure
from matplotlib.patches import Circle, Rectangle

PACKAGE = Path(__file__).parents[2] / "fusedrec_torchrec"
INK, FILL, DOT, LINE = "#1f2933", "#e0f2fe", "#c2410c", "#e5e7eb"
STEP, TOP, LEFT, MATRIX, NAME_WIDTH, LETTERS = 0.36, 0.45, 0.1, 1.4, 0.75, 10.5


def imports_of(part: Path) -> set[str]:
    """Returns the parts that the files of a part import."""
    imported = set()
    for file in part.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith(PACKAGE.name):
                names = [f"{node.module}.{alias.name}" for alias in node.names]
                imported |= {name.split(".")[1] for name in names}
    return {name for name in imported if (PACKAGE / name).is_dir()} - {part.name}


def parts_in_order() -> list[str]:
    """Returns the parts in the order of docs/architecture.md."""
    text = (PACKAGE.parent / "docs" / "architecture.md").read_text()
    return re.findall(r"^\| `(\w+)` \|", text, re.MULTILINE)


def draw() -> Figure:
    order = parts_in_order()
    imports = {part: imports_of(PACKAGE / part) for part in order}
    height, width = STEP * len(order) + TOP, MATRIX + STEP * len(order) + NAME_WIDTH
    figure = Figure(figsize=(width, height))
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set_xlim(0, width)
    axes.set_ylim(0, height)
    axes.axis("off")
    for row, part in enumerate(order):
        y = height - TOP - STEP * (row + 0.5) + 0.1
        x = MATRIX + STEP * row
        axes.text(LEFT, y, part, fontsize=LETTERS, fontweight="bold", va="center", color=INK)
        axes.plot([MATRIX - 0.2, x - 0.15], [y, y], color=LINE, lw=1, zorder=0)
        axes.plot([x, x], [y - 0.15, 0.1], color=LINE, lw=1, zorder=0)
        axes.add_patch(Rectangle((x - 0.1, y - 0.1), 0.2, 0.2, fc=FILL, ec=INK, lw=0.8))
        axes.text(x + 0.18, y, part, fontsize=LETTERS, va="center", color=INK)
        for column, other in enumerate(order[:row]):
            if other in imports[part]:
                axes.add_patch(Circle((MATRIX + STEP * column, y), 0.09, fc=DOT, ec="none"))
    title = "A dot: the part of this line imports the part of this column."
    axes.text(LEFT, height - 0.22, title, fontsize=LETTERS, color=DOT, va="center")
    return figure


if __name__ == "__main__":
    mpl.rcParams["svg.hashsalt"] = "parts"  # the same file every time
    path = Path(sys.argv[1] if len(sys.argv) > 1 else Path(__file__).with_suffix(".svg"))
    draw().savefig(path, metadata={"Date": None})
    print(path)
