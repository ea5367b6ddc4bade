"""Types of arguments that name files to write, for argparse: mistakes show before the work."""

import argparse
from pathlib import Path

__all__ = ["output_file", "plot_file"]

PLOTS = (".png", ".pdf", ".svg")


def output_file(text: str) -> Path:
    """A file that is not there yet or may be replaced, and no folder."""
    path = Path(text)
    if path.is_dir():
        raise argparse.ArgumentTypeError(f"{text} is a folder, must be a file")
    return path


def plot_file(text: str) -> Path:
    """The same, of a kind that can be drawn."""
    path = output_file(text)
    if path.suffix.lower() not in PLOTS:
        raise argparse.ArgumentTypeError(f"{text} must end in one of {', '.join(PLOTS)}")
    return path
