"""Small files of arrays with a description: access profiles and hot sets.

They are NumPy's archives, read without pickle and with all that they say checked: sizes before
anything is allocated, types, and that ids are rows of their tables.
"""

import io
import json
import math
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from fusedrec_torchrec.core.files import replacing
from fusedrec_torchrec.core.folder_files import shown
from fusedrec_torchrec.core.json_file import parse_json

__all__ = ["ArrayFile", "open_arrays", "read_arrays", "write_arrays"]

VERSION = 1
LARGEST = 1 << 30  # bytes of all arrays
MOST_ROWS = 1 << 60


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


def open_arrays(path: Path, kind: str) -> IO[bytes]:
    """
    Raises:
        ValueError: no such file.
    """
    try:
        return path.open("rb")
    except FileNotFoundError:
        raise ValueError(f"{kind} {path} does not exist") from None
    except OSError as error:
        raise ValueError(f"{kind} {path} cannot be read: {error.strerror}") from None


def read_arrays(file: IO[bytes], source: object, kind: str) -> "ArrayFile":
    """Returns what is in an open file; ``source`` is what messages call it.

    Raises:
        ValueError: it is not of this kind and version, or damaged.
    """
    try:
        arrays = _arrays(file)
        about = parse_json(str(arrays.pop("about")), source)
        found, version = about["kind"], about["version"]
    except Exception as error:  # a damaged archive can raise anything
        raise ValueError(f"{source} is no {kind}: {error}") from None
    if found != kind:
        raise ValueError(f"{source} is no {kind}, but a {shown(found)[1:-1]}")
    if version != VERSION:
        raise ValueError(
            f"{source} has version {shown(version)}, this release reads version {VERSION}"
        )
    return ArrayFile(source, about, arrays)


def _arrays(file: IO[bytes]) -> dict[str, NDArray[Any]]:
    with zipfile.ZipFile(file) as archive:
        size = sum(info.file_size for info in archive.infolist())
        if size > LARGEST:
            raise ValueError(f"its arrays have {size} bytes, may have {LARGEST}")
        return {
            info.filename.removesuffix(".npy"): _array(archive.read(info))
            for info in archive.infolist()
        }


def _array(content: bytes) -> NDArray[Any]:
    """An array in NumPy's format, of which nothing is allocated that is not there."""
    file = io.BytesIO(content)
    version = np.lib.format.read_magic(file)
    if version != (1, 0):
        raise ValueError(f"an array has version {version} of NumPy's format, must have (1, 0)")
    shape, by_columns, dtype = np.lib.format.read_array_header_1_0(file)
    if dtype.kind not in "iuU" or (by_columns and len(shape) > 1):
        raise ValueError(f"an array is of {dtype}, must be of whole numbers")
    if math.prod(shape) * dtype.itemsize != len(content) - file.tell():
        raise ValueError(f"an array of shape {shown(list(shape))} has another number of bytes")
    return np.frombuffer(content, dtype, offset=file.tell()).reshape(shape).copy()


class ArrayFile:
    """What is in a file, field by field.

    Every method raises ``ValueError`` if its field is missing or wrong.
    """

    def __init__(
        self, source: object, about: dict[str, Any], arrays: dict[str, NDArray[Any]]
    ) -> None:
        self._source, self._about, self._arrays = source, about, arrays

    def count(self, name: str, default: int | None = None) -> int:
        """A number of 0 or more."""
        return self._count(name, self._about.get(name, default))

    def counts_by_name(self, name: str) -> dict[str, int]:
        """Numbers of 0 or more by table."""
        found = self._about.get(name)
        if not isinstance(found, dict):
            raise ValueError(f"{self._source} is damaged: {name} is {shown(found)}")
        return {table: self._count(name, value) for table, value in found.items()}

    def table_rows(self) -> dict[str, int]:
        """Rows of each table."""
        return self.counts_by_name("table_rows")

    def ids(self, place: int, table: str) -> NDArray[np.int64]:
        """Rows of a table, each of them once."""
        found = self.counts(f"ids_{place}")
        rows = self.table_rows()[table]
        if len(found) and int(found.max()) >= rows:
            raise ValueError(
                f"{self._source} is damaged: it has row {found.max()} of table {shown(table)}, "
                f"which has {rows} rows"
            )
        if len(np.unique(found)) < len(found):
            raise ValueError(
                f"{self._source} is damaged: it has a row of table {shown(table)} twice"
            )
        return found

    def counts(self, name: str, length: int | None = None) -> NDArray[np.int64]:
        """A list of numbers of 0 or more."""
        found = self._arrays.get(name)
        if found is None or found.dtype != np.int64 or found.ndim != 1:
            raise ValueError(f"{self._source} is damaged: {name} is missing, or no list of numbers")
        if length not in (None, len(found)):
            raise ValueError(f"{self._source} is damaged: {name} has {len(found)} numbers")
        if len(found) and int(found.min()) < 0:
            raise ValueError(f"{self._source} is damaged: {name} has {found.min()}")
        return found

    def _count(self, name: str, value: Any) -> int:
        if type(value) is not int or not 0 <= value < MOST_ROWS:
            raise ValueError(
                f"{self._source} is damaged: {name} is {shown(value)}, must be 0 or more"
            )
        return value
