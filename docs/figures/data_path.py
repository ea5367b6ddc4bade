"""Draws docs/figures/data_path.svg, one training step as the data sees it (`make figures`).

The picture is as wide as a column of text, so that its letters are as large as those around it.
"""

import sys
from pathlib import Path

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch

PICTURE_WIDTH, PICTURE_HEIGHT = 7.9, 7.0
LEFT, RIGHT, WIDTH, HEIGHT = 0.1, 4.95, 2.85, 0.92
INK, WIRE, BACK = "#1f2933", "#c2410c", "#1d4ed8"
REQUESTER, OWNER = "#e0f2fe", "#fef3c7"
TITLE, TEXT = 12.5, 10.2  # font sizes

# The lower edge of each station; stations at the same height exchange data.
STATIONS = [
    (LEFT, 5.45, "batch", "ids, lengths and weights\nof all features"),
    (LEFT, 4.2, "keys", "one number says\ntable and row"),
    (LEFT, 2.95, "dedup", "each key and each bag once,\nfor all tables together"),
    (RIGHT, 2.95, "lookup", "one FBGEMM call for each\nphysical table"),
    (LEFT, 1.55, "pooling", "sum, mean, weighted, or\nnot at all for sequences"),
    (RIGHT, 1.55, "output dist", "each row once, or one\nfor each distinct bag"),
    (LEFT, 0.15, "gradients", "summed for each row\nthat came"),
    (RIGHT, 0.15, "fused optimizer", "FBGEMM updates each\nrow once"),
]


def station(axes: Axes, x: float, y: float, name: str, text: str) -> None:
    color = REQUESTER if x == LEFT else OWNER
    box = FancyBboxPatch(
        (x, y), WIDTH, HEIGHT, boxstyle="round,pad=0.02,rounding_size=0.08", fc=color, ec=INK, lw=1
    )
    axes.add_patch(box)
    axes.text(x + 0.12, y + 0.76, name, fontsize=TITLE, fontweight="bold", color=INK, va="center")
    axes.text(x + 0.12, y + 0.33, text, fontsize=TEXT, color=INK, va="center", linespacing=1.25)


def arrow(axes: Axes, start: tuple[float, float], end: tuple[float, float], color: str) -> None:
    axes.add_patch(
        FancyArrowPatch(start, end, arrowstyle="-|>", mutation_scale=16, lw=2, color=color)
    )


def wire(axes: Axes, y: float, to_owner: bool, title: str, text: str, color: str) -> None:
    ends = [(LEFT + WIDTH + 0.06, y), (RIGHT - 0.06, y)]
    start, end = ends if to_owner else ends[::-1]
    arrow(axes, start, end, color)
    middle = (LEFT + WIDTH + RIGHT) / 2
    axes.text(middle, y + 0.13, title, fontsize=TEXT, color=color, ha="center", fontweight="bold")
    axes.text(middle, y - 0.28, text, fontsize=TEXT, color=color, ha="center")
    axes.text(middle, y - 0.48, "1 all-to-all", fontsize=TEXT, color=color, ha="center")


def draw() -> Figure:
    figure = Figure(figsize=(PICTURE_WIDTH, PICTURE_HEIGHT))
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set_xlim(0, PICTURE_WIDTH)
    axes.set_ylim(0, PICTURE_HEIGHT)
    axes.axis("off")
    for x, text in ((LEFT, "the rank that asks"), (RIGHT, "the ranks that own the rows")):
        axes.text(x + WIDTH / 2, 6.62, text, fontsize=TITLE, ha="center", color=INK)
    for x, y, name, text in STATIONS:
        station(axes, x, y, name, text)
    middle = LEFT + WIDTH / 2
    arrow(axes, (middle, 5.44), (middle, 5.12), INK)
    arrow(axes, (middle, 4.19), (middle, 3.87), INK)
    arrow(axes, (RIGHT + WIDTH / 2, 2.94), (RIGHT + WIDTH / 2, 2.47), INK)
    arrow(axes, (middle, 1.54), (middle, 1.07), BACK)
    axes.text(middle + 0.14, 1.31, "backward", fontsize=TEXT, color=BACK, va="center")
    wire(axes, 3.5, True, "input dist", "counts, ids, bags", WIRE)
    wire(axes, 2.1, False, "rows", "back to who asked", WIRE)
    wire(axes, 0.7, True, "gradients", "back to the owner", BACK)
    return figure


def main() -> None:
    target = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).with_suffix(".svg")
    mpl.rcParams["svg.hashsalt"] = "fusedrec"  # the same picture is the same file
    draw().savefig(target, metadata={"Date": None})


if __name__ == "__main__":
    main()
