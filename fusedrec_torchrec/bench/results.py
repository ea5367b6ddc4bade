"""The file that the figures of a suite are in."""

from pathlib import Path
from typing import Any

from fusedrec_torchrec.core.json_file import parse_json

__all__ = ["RESULTS", "VERSION", "load_results"]

RESULTS = "results.json"
VERSION = 1


def load_results(path: Path) -> dict[str, Any]:
    """Returns a document that ``run_suite`` wrote.

    Raises:
        ValueError: there is none, or it is damaged or of another version.
    """
    if not path.is_file():
        raise ValueError(f"{path.parent} holds no results of a benchmark ({path.name} is missing)")
    try:
        document: dict[str, Any] = parse_json(path.read_bytes(), path)
        version = document["version"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} holds no results of a benchmark: {error}") from None
    if version != VERSION:
        raise ValueError(f"{path} holds results of version {version}, must be {VERSION}")
    return document
