"""Types for argparse of arguments that name files to write: mistakes show before the work."""

import argparse
from pathlib import Path

__all__ = ["output_file", "plot_file"]

PLOTS = (".png", ".pdf", ".svg")


def output_file(text: str) -> Path:
    """Takes a file that is not there yet or may be replaced, and refuses a folder."""
    path = Path(text)
    if path.is_dir():
        raise argparse.ArgumentTypeError(f"{text} is a folder, must be a file")
    return path


def plot_file(text: str) -> Path:
    """Takes a file of a kind that can be drawn."""
    path = output_file(text)
    if path.suffix.lower() not in PLOTS:
        raise argparse.ArgumentTypeError(f"{text} must end in one of {', '.join(PLOTS)}")
    return path
