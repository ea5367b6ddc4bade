"""Draws one picture of runs for the terminal."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Group, RenderableType
from rich.panel import Panel as Box
from rich.table import Table
from rich.text import Text

from fusedrec_torchrec.core.terminal import human_bytes
from fusedrec_torchrec.watch.plots import bar, curves, written

__all__ = ["duration", "frame_of"]

STYLES = ("bright_blue", "yellow", "green", "magenta", "cyan", "red", "bright_green", "white")
STATE_STYLES = {"waiting": "dim", "running": "green", "finished": "blue", "stopped": "red"}
CARD, CHART, BORDERS = 40, 4, 2  # letters of a card, lines of its plot and of its borders
NAME = 16  # letters of what a bar is of
MOST_RANKS = 16
WIDE = 100  # letters of a line that has room for more than what counts most
Run = dict[str, Any]


@dataclass(frozen=True)
class Card:
    """Is something to draw in a box, which takes so many lines."""

    drawn: RenderableType
    lines: int


def frame_of(document: dict[str, Any], width: int, height: int | None = None) -> RenderableType:
    """Returns a picture of runs.

    Args:
        document: of the runs, see ``document_of``.
        width: letters of a line.
        height: lines that there are; what does not fit is left out.  As many as it takes if None.
    """
    runs = document["runs"]
    across = max(width // CARD, 1)
    card = width // across
    bars = [made for made in (draw(runs, card) for draw in (_collectives, _ranks, _stages)) if made]
    cards = [_curves(panel, runs, card) for panel in document["panels"]]
    wanted = [*cards, *bars]
    if height is not None:
        cards = _fitting(cards, bars, across, height - len(runs) - 3)
        wanted = cards
    left_out = len(document["panels"]) + len(bars) - len(wanted)
    parts: list[RenderableType] = [_heads(runs, width)]
    if wanted:
        parts.append(_grid(wanted, across, card))
    else:
        parts.append(Text("no records yet: the first comes after logging.log_every steps", "dim"))
    if left_out:
        parts.append(Text(f"{left_out} more: in a larger window, with --once or with --web", "dim"))
    return Group(*parts)


def duration(seconds: float) -> str:
    """Returns a time as people say it: 42 s, 3 min 20 s, 2 h 5 min, 3 d 4 h."""
    for unit, size, smaller, rest in (
        ("d", 86400, "h", 3600),
        ("h", 3600, "min", 60),
        ("min", 60, "s", 1),
    ):
        if seconds >= size:
            count, left = divmod(round(seconds), size)
            return f"{count} {unit} {left // rest} {smaller}"
    return f"{seconds:.0f} s"


def _fitting(cards: list[Card], bars: list[Card], across: int, height: int) -> list[Card]:
    """Returns as many cards as fit, of curves first, and the bars if there is room for both."""
    of_bars = max((made.lines for made in bars), default=0)
    one_row = max((made.lines for made in cards), default=0)
    shown_bars = bars[:across] if one_row + of_bars <= height else []
    rows = max((height - (of_bars if shown_bars else 0)) // max(one_row, 1), 1)
    return [*cards[: rows * across], *shown_bars]


def _grid(cards: Sequence[Card], across: int, width: int) -> Table:
    grid = Table.grid()
    for _ in range(across):
        grid.add_column(width=width)
    # Bars are of many lines, curves of few: they do not share a row.
    lines = cards[0].lines
    rows: list[list[Card]] = []
    for made in cards:
        is_alike = bool(rows) and (rows[-1][0].lines == lines) == (made.lines == lines)
        if not is_alike or len(rows[-1]) == across:
            rows.append([])
        rows[-1].append(made)
    for row in rows:
        grid.add_row(*(made.drawn for made in row))
    return grid


def _heads(runs: Sequence[Run], width: int) -> Table:
    """Returns a line for each run: its name, how far it is, and what counts most."""
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    rows = [_head(run) for run in runs]
    shown = [title for title in rows[0] if width >= WIDE or title not in ("ranks", "sharding")]
    for title in ("run", "state", *shown):
        table.add_column(title, no_wrap=True, overflow="ellipsis")
    for number, (run, row) in enumerate(zip(runs, rows, strict=True)):
        name = Text(f"━ {run['name']}", STYLES[number % len(STYLES)])
        state = Text(run["state"], STATE_STYLES[run["state"]])
        table.add_row(name, state, *(row[title] for title in shown))
    return table


def _head(run: Run) -> dict[str, str]:
    latest, left = run["latest"], run["remaining_seconds"]
    return {
        "step": f"{run['step']}" + (f" of {run['steps']}" if run["steps"] else ""),
        "left": "-" if left is None else duration(left),
        "ranks": str(run["ranks"] or "-"),
        "sharding": str(run["sharding"] or "-"),
        "samples/s": written(latest.get("samples_per_second", {}).get("train"), "count"),
        "log loss": written(latest.get("log_loss", {}).get("train"), "number"),
        "AUC": written(latest.get("auc", {}).get("eval"), "number"),
        "skipped": str(run["skipped_steps"]),
    }


def _curves(panel: dict[str, Any], runs: Sequence[Run], width: int) -> Card:
    """Returns the card of one panel: the latest values, and the curves of all runs."""
    drawn, values = [], Text()
    for number, run in enumerate(runs):
        style = STYLES[number % len(STYLES)]
        of_run = run["curves"][panel["key"]]
        drawn.append((of_run["train"], style, True))
        drawn.append((of_run["eval"], f"bold {style}", False))
        latest = run["latest"].get(panel["key"], {})
        shown = [
            written(latest[kind], panel["shown"]) for kind in ("train", "eval") if kind in latest
        ]
        values.append(" / ".join(shown) + "  " if shown else "", style)
    text = Text.assemble(values, "\n", curves(drawn, width - 4, CHART, panel["from_zero"]))
    text.no_wrap, text.overflow = True, "crop"
    return Card(_box(panel["title"], panel["unit"], text, width), CHART + 1 + BORDERS)


def _collectives(runs: Sequence[Run], width: int) -> Card | None:
    names = {run["name"]: run["bytes_by_collective"] for run in runs}
    return _bars("Bytes by collective", "of a step, first rank", names, runs, width, human_bytes)


def _ranks(runs: Sequence[Run], width: int) -> Card | None:
    loads = {}
    for run in runs:
        rows = run["rows_by_rank"]
        apart = max(-(-len(rows) // MOST_RANKS), 1)
        loads[run["name"]] = {f"rank {r}": rows[r] for r in range(0, len(rows), apart)}
    return _bars("Load of ranks", "rows looked up in a step", loads, runs, width, "{:,.0f}".format)


def _stages(runs: Sequence[Run], width: int) -> Card | None:
    stages = {run["name"]: run["stage_ms"] for run in runs}
    return _bars("Stages of a step", "ms, mean of ranks", stages, runs, width, "{:.2f}".format)


def _bars(
    title: str,
    unit: str,
    values: dict[str, dict[str, float]],
    runs: Sequence[Run],
    width: int,
    write: Callable[[float], str],
) -> Card | None:
    """Returns a card of bars, for each name one of every run; None if there are none."""
    # In the order of the run that has the most of them.
    most_first = sorted(values.values(), key=len, reverse=True)
    names = list(dict.fromkeys(name for of_run in most_first for name in of_run))
    most = max((value for of_run in values.values() for value in of_run.values()), default=0)
    if not names:
        return None
    text = Text(no_wrap=True, overflow="crop")
    lines = 0
    for name in names:
        label = name.replace("_", " ")
        for number, run in enumerate(runs):
            value = values[run["name"]].get(name)
            if value is None:
                continue
            text.append("\n" if lines else "")
            text.append(f"{label:<{NAME}.{NAME}} ")
            share = value / most if most else 0.0
            text.append(bar(share, max(width - NAME - 16, 4)), STYLES[number % len(STYLES)])
            text.append(f" {write(value):>10}")
            label, lines = "", lines + 1
    return Card(_box(title, unit, text, width), lines + BORDERS)


def _box(title: str, unit: str, content: RenderableType, width: int) -> Box:
    name = Text.assemble((title, "bold"), (f" {unit}" if unit else "", "dim"))
    name.truncate(width - 6, overflow="ellipsis")
    return Box(content, title=name, title_align="left", border_style="dim", width=width)
