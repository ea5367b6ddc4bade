"""Small files of arrays with a description: access profiles and hot sets."""

import json
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fusedrec_torchrec.files import replacing

__all__ = ["read_arrays", "write_arrays"]

VERSION = 1


def write_arrays(
    path: Path, kind: str, about: Mapping[str, Any], arrays: Mapping[str, NDArray[Any]]
) -> None:
    """Writes a file, whole or not at all.

    Args:
        path: of the file.
        kind: what it is.
        about: its description, as JSON can hold it.
        arrays: by name.
    """
    description = json.dumps({"kind": kind, "version": VERSION, **about})
    content: dict[str, Any] = {"about": np.array(description), **arrays}
    with (
        replacing(path, path.with_name(f".{path.name}.partial")) as partial,
        partial.open("wb") as file,
    ):
        np.savez_compressed(file, **content)


def read_arrays(path: Path, kind: str) -> tuple[dict[str, Any], dict[str, NDArray[Any]]]:
    """Description and arrays of a file.

    Raises:
        ValueError: no such file, or none of this kind and version.
    """
    try:
        with np.load(path, allow_pickle=False) as file:
            about = json.loads(str(file["about"]))
            arrays = {name: file[name] for name in file.files if name != "about"}
        found, version = about["kind"], about["version"]
    except FileNotFoundError:
        raise ValueError(f"{kind} {path} does not exist") from None
    except (OSError, KeyError, TypeError, ValueError, zipfile.BadZipFile):
        raise ValueError(f"{path} is no {kind}") from None
    if found != kind:
        raise ValueError(f"{path} is no {kind}, but a {found}")
    if version != VERSION:
        raise ValueError(f"{path} has version {version}, this release reads version {VERSION}")
    return about, arrays
