"""``--json``: what a command has to say, for programs, and nothing else on standard output.

While such a command works, whatever it prints goes to standard error, and so does what its
processes and libraries print.  The answer is printed at the end; its keys are in docs/commands.md.
"""

import argparse
import ctypes
import json
import math
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, redirect_stdout
from contextvars import ContextVar
from typing import Any

__all__ = ["add_json", "only_json", "print_json"]

_answers: ContextVar[list[Any] | None] = ContextVar("answers", default=None)


def add_json(parser: argparse.ArgumentParser) -> None:
    """Adds the flag to a command that prints tables."""
    parser.add_argument(
        "--json",
        action="store_true",
        help="prints JSON instead of tables, and nothing else on standard output; docs/commands.md "
        "has the keys",
    )


@contextmanager
def only_json(is_wanted: bool) -> Iterator[None]:
    """Keeps standard output free for what ``print_json`` is given in here, if that is wanted."""
    if not is_wanted:
        yield
        return
    answers: list[Any] = []
    before = _answers.set(answers)
    try:
        with _descriptor_redirected(), redirect_stdout(sys.stderr):
            yield
    finally:
        _answers.reset(before)
    for answer in answers:
        print(json.dumps(_plain(answer), indent=1, allow_nan=False))


def print_json(answer: Mapping[str, Any]) -> None:
    """Prints the answer of a command, once it has ended without an error."""
    answers = _answers.get()
    assert answers is not None, "main calls a command with --json in only_json"
    answers.append(answer)


@contextmanager
def _descriptor_redirected() -> Iterator[None]:
    """Has processes and libraries that write to standard output write to standard error."""
    sys.stdout.flush()
    kept = os.dup(1)
    os.dup2(2, 1)
    try:
        yield
    finally:
        ctypes.CDLL(None).fflush(None)  # what libraries have printed and not written yet
        os.dup2(kept, 1)
        os.close(kept)


def _plain(value: Any) -> Any:
    """Returns a value as JSON can hold it: what is no finite number is null, a path is a text."""
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if value is None or isinstance(value, bool | int | str):
        return value
    if hasattr(value, "item"):  # a number of numpy
        return _plain(value.item())
    return str(value)
