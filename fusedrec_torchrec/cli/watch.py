"""``fusedrec watch`` shows what runs have recorded: in the terminal, in a browser, for programs."""

import argparse
import math
import sys
from pathlib import Path
from typing import Any

from fusedrec_torchrec.cli.json_output import add_json, print_json
from fusedrec_torchrec.cli.manual import add_parser

__all__ = ["add_command"]

PORT = 8765
EXAMPLES = {
    "fusedrec watch runs/tiny": "Draws curves in the terminal until the run has ended.",
    "fusedrec watch runs/tiny runs/table_wise --once": "Compares two runs, in one picture.",
    "fusedrec watch runs/tiny --web": f"Shows a page at http://127.0.0.1:{PORT}/ instead.",
    "fusedrec watch runs/tiny --json": "Prints the same figures for a program.",
}


def add_command(commands: Any) -> None:
    """Adds the subcommand and its arguments to those of ``fusedrec``."""
    parser = add_parser(
        commands,
        "watch",
        purpose="Shows runs while they train and afterwards, from the records in their folders: "
        "curves, samples/s, bytes by collective, hit rate of hot rows, load of each rank, stages "
        "of a step and skipped steps.  Several runs are compared.  It only reads: a run does not "
        "notice, and a training on another machine can be watched through a shared file system.",
        examples=EXAMPLES,
        read_on="docs/training.md",
    )
    parser.add_argument(
        "runs", nargs="+", type=Path, metavar="RUN", help="folder of a run (logging.directory)"
    )
    parser.add_argument(
        "--web",
        nargs="?",
        type=_port,
        const=PORT,
        metavar="PORT",
        help="shows a page to browsers on this machine instead, at this port or at %(const)s; 0 is "
        "any free one",
    )
    parser.add_argument(
        "--once",
        action="store_true",
        help="prints one picture and ends; so it does where it does not write to a terminal",
    )
    parser.add_argument(
        "--every",
        type=_seconds,
        default=2.0,
        metavar="SECONDS",
        help="time between two looks at the records (default %(default)s)",
    )
    add_json(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> None:
    """Shows the runs as it is asked to."""
    from fusedrec_torchrec.watch.run import open_runs

    runs = open_runs(arguments.runs)
    if arguments.json:
        from fusedrec_torchrec.watch.document import document_of

        print_json(document_of(runs))
    elif arguments.web is not None:
        _serve(runs, arguments.web, arguments.every)
    else:
        from fusedrec_torchrec.watch.live import print_frame, watch_live

        if arguments.once or not sys.stdout.isatty():
            print_frame(runs)
        else:
            watch_live(runs, arguments.every)


def _serve(runs: Any, port: int, every: float) -> None:
    from fusedrec_torchrec.watch.server import HOST, WatchServer

    try:
        server = WatchServer(runs, port, every)
    except OSError as error:
        raise ValueError(
            f"--web is {port}, but {HOST}:{port} cannot be listened on: {error.strerror}; name "
            "another port, or 0 for any free one"
        ) from None
    with server:
        print(
            f"{server.url} shows {', '.join(run.name for run in runs)}; Ctrl-C ends it", flush=True
        )
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            print()  # behind the ^C of the terminal


def _port(text: str) -> int:
    if not text.isdecimal() or int(text) > 65535:
        raise argparse.ArgumentTypeError(
            f"it is {text!r}, must be a port from 0 to 65535; runs stand before --web"
        )
    return int(text)


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0.1 <= value <= 3600:
        raise argparse.ArgumentTypeError(f"it is {text!r}, must be from 0.1 to 3600 seconds")
    return value
