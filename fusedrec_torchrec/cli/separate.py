"""``fusedrec separate`` writes prepared data anew, with its hot samples first."""

import argparse
from pathlib import Path
from typing import Any

__all__ = ["add_command"]


def add_command(commands: Any) -> None:
    """Adds the subcommand and its arguments to those of ``fusedrec``."""
    parser = commands.add_parser(
        "separate",
        help="sort prepared data into hot samples and others, once, before training",
        description="Writes prepared data anew, with the samples first that need hot rows only, "
        "for data.hot_batches.order: separated.",
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
