"""The arguments of a training, which are those of ``fusedrec train`` and of every rank."""

import argparse

__all__ = ["add_arguments"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds them to a parser."""
    parser.add_argument("--config", required=True, help="YAML file that describes the run")
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="SECTION.KEY=VALUE",
        help="overrides one setting, may be given several times",
    )
    start = parser.add_mutually_exclusive_group()
    start.add_argument(
        "--resume",
        nargs="?",
        const="latest",
        metavar="CHECKPOINT",
        help="goes on from the run's latest checkpoint, or from the one given",
    )
    start.add_argument(
        "--overwrite", action="store_true", help="replaces a run that is in the folder"
    )
    parser.add_argument(
        "--quiet",
        action="store_true",
        help="no progress bars and nothing about single steps; errors and the summary remain",
    )
