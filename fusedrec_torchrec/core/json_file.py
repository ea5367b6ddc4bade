"""Reads JSON that somebody else wrote, or refuses it with the name of the file."""

import json
from pathlib import Path
from typing import Any

from fusedrec_torchrec.core.folder_files import read_in_folder

__all__ = ["parse_json", "read_json"]

LARGEST = 256 << 20  # bytes of a file


def read_json(folder: Path, name: str) -> Any:
    """Returns what a JSON file of a folder holds.

    Raises:
        FileNotFoundError: it is not there.
        ValueError: it cannot be read, or is no JSON, or is not in the folder.
    """
    try:
        content = read_in_folder(folder, name, LARGEST)
    except (FileNotFoundError, NotADirectoryError):
        raise FileNotFoundError(f"{folder / name} is missing") from None
    except OSError as error:
        raise ValueError(f"{folder / name} cannot be read: {error}") from None
    return parse_json(content, folder / name)


def parse_json(content: bytes | str, source: object) -> Any:
    """Returns what a text of JSON holds.

    Raises:
        ValueError: it is no JSON; ``source`` is where it comes from.
    """
    try:
        return json.loads(content)
    except RecursionError:
        raise ValueError(f"{source} is damaged: it is nested too deeply") from None
    except ValueError as error:  # of the encoding and of too many digits, too
        raise ValueError(f"{source} is damaged: {error}") from None
