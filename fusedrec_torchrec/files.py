"""Files that are whole or not there, and locks that die with their process."""

import fcntl
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

__all__ = ["locked", "sync_file", "write_json"]


def write_json(path: Path, data: dict[str, Any]) -> None:
    """A file that nobody sees half written."""
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(data, indent=1))
    sync_file(partial)
    partial.replace(path)


def sync_file(path: Path) -> None:
    """What is in a file outlives a power failure."""
    with path.open("rb") as file:
        os.fsync(file.fileno())


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """One process at a time, on this machine or on a shared file system that has locks."""
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
