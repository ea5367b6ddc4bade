"""The arguments of a training, which are those of ``fusedrec train`` and of every rank.

Two of them say what is trained: a configuration file, and settings that override it.
"""

import argparse
from collections.abc import Sequence

from fusedrec_torchrec.core.config import from_mapping, load_yaml, with_overrides
from fusedrec_torchrec.training.config import TrainConfig

__all__ = ["add_arguments", "load_config"]


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


def load_config(path: str, overrides: Sequence[str]) -> TrainConfig:
    """Reads the configuration of a run, with single settings overridden.

    Raises:
        ValueError: the file is missing, or something in it is unknown or out of range.
    """
    return from_mapping(TrainConfig, with_overrides(load_yaml(path), overrides), path)
