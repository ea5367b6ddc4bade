"""Draws docs/figures/data_path.svg, one training step as the data sees it (`make figures`)."""

import sys
from pathlib import Path

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch

LEFT, RIGHT, WIDTH, HEIGHT = 0.4, 6.6, 3.9, 0.62
INK, WIRE, BACK = "#1f2933", "#c2410c", "#1d4ed8"
REQUESTER, OWNER = "#e0f2fe", "#fef3c7"

# Height of each station; stations at the same height exchange data.
STATIONS = [
    (LEFT, 5.0, "batch", "ids, lengths and weights of all features"),
    (LEFT, 4.1, "keys", "(table, id) to one key space"),
    (LEFT, 3.2, "dedup", "unique keys and their inverse, all tables"),
    (RIGHT, 3.2, "lookup", "one FBGEMM table for each bucket"),
    (LEFT, 1.9, "pooling", "gather by inverse: sum, mean, weighted, sequence"),
    (RIGHT, 1.9, "output dist", "rows asked for, each once"),
    (LEFT, 0.6, "gradients", "summed for each unique row"),
    (RIGHT, 0.6, "fused optimizer", "FBGEMM updates the rows"),
]


def station(axes: Axes, x: float, y: float, name: str, text: str) -> None:
    color = REQUESTER if x == LEFT else OWNER
    box = FancyBboxPatch(
        (x, y), WIDTH, HEIGHT, boxstyle="round,pad=0.02,rounding_size=0.08", fc=color, ec=INK, lw=1
    )
    axes.add_patch(box)
    axes.text(x + 0.12, y + 0.4, name, fontsize=10.5, fontweight="bold", color=INK, va="center")
    axes.text(x + 0.12, y + 0.17, text, fontsize=7.6, color=INK, va="center")


def arrow(axes: Axes, start: tuple[float, float], end: tuple[float, float], color: str) -> None:
    axes.add_patch(
        FancyArrowPatch(start, end, arrowstyle="-|>", mutation_scale=13, lw=1.8, color=color)
    )


def wire(axes: Axes, y: float, to_owner: bool, title: str, text: str, color: str) -> None:
    ends = [(LEFT + WIDTH + 0.06, y), (RIGHT - 0.06, y)]
    start, end = ends if to_owner else ends[::-1]
    arrow(axes, start, end, color)
    middle = (LEFT + WIDTH + RIGHT) / 2
    axes.text(middle, y + 0.13, title, fontsize=8.4, color=color, ha="center", fontweight="bold")
    axes.text(middle, y - 0.22, text, fontsize=7.4, color=color, ha="center")


def draw() -> Figure:
    figure = Figure(figsize=(10.9, 6.3))
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set_xlim(0, 10.9)
    axes.set_ylim(0.2, 6.5)
    axes.axis("off")
    for x, text in ((LEFT, "requester rank"), (RIGHT, "owner ranks")):
        axes.text(x + WIDTH / 2, 6.05, text, fontsize=12, ha="center", color=INK)
    for x, y, name, text in STATIONS:
        station(axes, x, y, name, text)
    middle = LEFT + WIDTH / 2
    arrow(axes, (middle, 4.98), (middle, 4.76), INK)
    arrow(axes, (middle, 4.08), (middle, 3.86), INK)
    arrow(axes, (RIGHT + WIDTH / 2, 3.18), (RIGHT + WIDTH / 2, 2.56), INK)
    arrow(axes, (middle, 1.88), (middle, 1.26), BACK)
    axes.text(middle + 0.12, 1.52, "backward", fontsize=7.6, color=BACK, va="center")
    wire(axes, 3.51, True, "input dist: 1 all-to-all", "header, int32 rows", WIRE)
    wire(axes, 2.21, False, "rows: 1 all-to-all", "each row once", WIRE)
    wire(axes, 0.91, True, "gradients: 1 all-to-all", "each row once", BACK)
    return figure


def main() -> None:
    target = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).with_suffix(".svg")
    mpl.rcParams["svg.hashsalt"] = "fusedrec"  # the same picture is the same file
    draw().savefig(target, metadata={"Date": None})


if __name__ == "__main__":
    main()
