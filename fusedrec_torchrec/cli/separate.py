"""``fusedrec separate`` writes prepared data anew, with its hot samples first."""

import argparse
from pathlib import Path
from typing import Any

from fusedrec_torchrec.cli.manual import add_parser

__all__ = ["add_command"]

EXAMPLES = {
    "fusedrec profile prepared --hot-set hot.npz --hot-rows 2000 --sample-only": "Picks hot rows "
    "first, by a sample.",
    "fusedrec separate prepared --hot-set hot.npz --output separated": "Writes samples that need "
    "no other rows first.",
}


def add_command(commands: Any) -> None:
    """Adds the subcommand and its arguments to those of ``fusedrec``."""
    parser = add_parser(
        commands,
        "separate",
        purpose="Writes prepared data anew, with the samples first that need hot rows only, for "
        "data.hot_batches.order: separated.  Batches of such samples need no exchange.",
        examples=EXAMPLES,
        read_on="docs/hot-rows.md",
    )
    parser.add_argument("data", type=Path, help="a folder of prepared data")
    parser.add_argument(
        "--hot-set", type=Path, required=True, help="as fusedrec profile --hot-set writes it"
    )
    parser.add_argument("--output", type=Path, required=True, help="a new folder")
    parser.add_argument(
        "--held-out",
        type=float,
        default=0.1,
        help="share at the end that is kept for evaluation, and stays (default %(default)s)",
    )
    parser.add_argument("--quiet", action="store_true", help="no progress bars")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> None:
    """Writes the data and says how many samples are hot."""
    from fusedrec_torchrec.access.hot_set import HotSet
    from fusedrec_torchrec.training.data.prepared import PreparedData
    from fusedrec_torchrec.training.data.separate import separate

    hot_set = HotSet.load(arguments.hot_set)
    data = separate(
        PreparedData.open(arguments.data),
        hot_set,
        arguments.output,
        arguments.held_out,
        progress=not arguments.quiet,
    )
    assert data.hot_samples is not None
    print(
        f"{arguments.output}: {data.samples} samples, the first {data.hot_samples[0]} need hot "
        "rows only"
    )
