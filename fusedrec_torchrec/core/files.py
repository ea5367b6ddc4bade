"""Writes files that are whole or not there, names files in errors, and locks them."""

import fcntl
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

__all__ = [
    "described",
    "file_lock",
    "looked_for",
    "naming",
    "replacing",
    "sync_file",
    "write_json",
    "write_text",
]


def described(error: OSError) -> str:
    """Returns what the operating system refused, for people: the paths, then the reason."""
    if error.errno is None:
        return str(error)
    # Libraries put their own words in the place of the system's, and numbers of errors beside it.
    reason = os.strerror(error.errno)
    paths = [str(path) for path in (error.filename, error.filename2) if path is not None]
    return f"{' and '.join(paths)}: {reason}" if paths else reason


def looked_for(path: Path) -> str:
    """Returns where a path was looked for, to go behind "does not exist"; a whole path says it."""
    return "" if path.is_absolute() else f" in {Path.cwd()}"


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Puts this path into errors of the operating system that do not name a file."""
    try:
        yield
    except OSError as error:
        if error.filename is not None:
            raise
        if error.errno is None:
            raise OSError(f"{path}: {error}") from error
        raise OSError(error.errno, os.strerror(error.errno), str(path)) from error


@contextmanager
def replacing(path: Path, partial: Path | None = None) -> Iterator[Path]:
    """Gives a path to write to, which takes the place of ``path`` when all of it is written.

    What is half written is removed, which also gives a full disk its room back.
    """
    partial = partial or path.with_suffix(".partial")
    try:
        with naming(path):
            yield partial
            sync_file(partial)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
    partial.replace(path)


def write_json(path: Path, data: dict[str, Any]) -> None:
    """Writes a JSON file that nobody sees half written."""
    with replacing(path) as partial:
        partial.write_text(json.dumps(data, indent=1))


def write_text(path: Path, text: str) -> None:
    """Writes a file of text; errors name it, also when it is the disk that is full."""
    with naming(path):
        path.write_text(text, encoding="utf-8")


def sync_file(path: Path) -> None:
    """Makes sure that what is in a file outlives a power failure."""
    with path.open("rb") as file:
        os.fsync(file.fileno())


@contextmanager
def file_lock(path: Path) -> Iterator[None]:
    """Lets one process at a time in, on this machine or on a shared file system that has locks.

    The lock dies with its process.
    """
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
