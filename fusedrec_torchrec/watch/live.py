"""Shows runs in the terminal, one picture after another, until all of them have ended."""

import time
from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.live import Live

from fusedrec_torchrec.watch.document import document_of
from fusedrec_torchrec.watch.frame import frame_of
from fusedrec_torchrec.watch.run import WatchedRun

__all__ = ["print_frame", "watch_live"]

PLAIN_WIDTH = 120  # where there is no terminal to ask
ENDED = ("finished", "stopped")


def print_frame(runs: Sequence[WatchedRun], console: Console | None = None) -> None:
    """Prints one picture of runs, as it is at this moment."""
    console = console or _console()
    console.print(frame_of(document_of(runs), console.width))


def watch_live(runs: Sequence[WatchedRun], every: float, console: Console | None = None) -> None:
    """Draws anew every so many seconds; leaves the last picture behind, also when interrupted."""
    console = console or _console()
    document = document_of(runs)
    try:
        if not _have_ended(document):
            with Live(console=console, screen=True, auto_refresh=False) as live:
                while not _have_ended(document):
                    live.update(frame_of(document, console.width, console.height), refresh=True)
                    time.sleep(every)
                    document = document_of(runs)
    except KeyboardInterrupt:
        pass  # the usual end of a look at a run
    console.print(frame_of(document, console.width))


def _have_ended(document: dict[str, Any]) -> bool:
    return all(run["state"] in ENDED for run in document["runs"])


def _console() -> Console:
    console = Console(highlight=False)
    return console if console.is_terminal else Console(highlight=False, width=PLAIN_WIDTH)
