"""Types for argparse of arguments that are numbers in a range."""

import argparse
from collections.abc import Callable

__all__ = ["whole"]


def whole(least: int) -> Callable[[str], int]:
    """Returns a type that takes whole numbers of at least ``least``."""

    def parse(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = least - 1
        if value < least:
            raise argparse.ArgumentTypeError(
                f"it is {text!r}, must be a whole number of at least {least}"
            )
        return value

    return parse
