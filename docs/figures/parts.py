"""Draws docs/figures/parts.svg, the parts of the package and who imports whom (`make figures`).

Everything in it is read from the package: the first sentence of each folder's docstring, and the
imports of its files.
"""

import ast
import re
import sys
from pathlib import Path

import matplotlib as mpl
from matplotlib.figure import Figure
from matplotlib.patches import Circle, FancyBboxPatch

PACKAGE = Path(__file__).parents[2] / "fusedrec_torchrec"
INK, FILL, DOT, LINE = "#1f2933", "#e0f2fe", "#c2410c", "#e5e7eb"
STEP, LEFT, NAME_WIDTH, MATRIX = 0.42, 0.2, 1.35, 8.1


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


def sentence_of(part: str) -> str:
    """Returns the first sentence of a folder's docstring."""
    text = ast.get_docstring(ast.parse((PACKAGE / part / "__init__.py").read_text())) or ""
    return text.partition("\n")[0].replace("``", "")


def draw() -> Figure:
    order = parts_in_order()
    imports = {part: imports_of(PACKAGE / part) for part in order}
    height, width = STEP * len(order) + 0.8, MATRIX + STEP * len(order) + 0.3
    figure = Figure(figsize=(width, height))
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set_xlim(0, width)
    axes.set_ylim(0, height)
    axes.axis("off")
    for row, part in enumerate(order):
        y = height - 0.75 - STEP * row
        box = FancyBboxPatch(
            (LEFT, y - 0.13),
            NAME_WIDTH,
            0.26,
            boxstyle="round,pad=0.02,rounding_size=0.06",
            fc=FILL,
            ec=INK,
            lw=0.8,
        )
        axes.add_patch(box)
        middle = LEFT + NAME_WIDTH / 2
        axes.text(middle, y, part, fontsize=9, fontweight="bold", ha="center", va="center")
        axes.text(LEFT + NAME_WIDTH + 0.15, y, sentence_of(part), fontsize=8, va="center")
        axes.plot([MATRIX, MATRIX + STEP * row], [y, y], color=LINE, lw=1, zorder=0)
        x = MATRIX + STEP * row
        axes.text(x, y, part[:3], fontsize=7, ha="center", va="center", color=INK)
        for column, other in enumerate(order[:row]):
            if other in imports[part]:
                axes.add_patch(Circle((MATRIX + STEP * column, y), 0.07, fc=DOT, ec="none"))
    axes.text(MATRIX, height - 0.35, "imports", fontsize=8, color=DOT, va="center")
    return figure


if __name__ == "__main__":
    mpl.rcParams["svg.hashsalt"] = "parts"  # the same file every time
    path = Path(sys.argv[1] if len(sys.argv) > 1 else Path(__file__).with_suffix(".svg"))
    draw().savefig(path, metadata={"Date": None})
    print(path)
