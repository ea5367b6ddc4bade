"""Files that are whole or not there, and locks that die with their process."""

import fcntl
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

__all__ = ["locked", "write_json"]


def write_json(path: Path, data: dict[str, Any]) -> None:
    """A file that nobody sees half written."""
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(data, indent=1))
    partial.replace(path)


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """One process at a time, on this machine or on a shared file system that has locks."""
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
