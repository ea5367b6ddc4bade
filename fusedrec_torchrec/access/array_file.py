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
    """Opens a file of arrays to be read.

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
        actual, version = about["kind"], about["version"]
    except Exception as error:  # a damaged archive can raise anything
        raise ValueError(f"{source} is no {kind}: {error}") from None
    if actual != kind:
        raise ValueError(f"{source} is no {kind}, but a {shown(actual)[1:-1]}")
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
    """Returns an array in NumPy's format; nothing is allocated that is not there."""
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
    """Gives what is in a file, field by field.

    Every method raises ``ValueError`` if its field is missing or wrong.
    """

    def __init__(
        self, source: object, about: dict[str, Any], arrays: dict[str, NDArray[Any]]
    ) -> None:
        self._source, self._about, self._arrays = source, about, arrays

    def count(self, name: str, default: int | None = None) -> int:
        """Returns a number of 0 or more."""
        return self._count(name, self._about.get(name, default))

    def has(self, name: str) -> bool:
        """Returns whether there is an array of this name."""
        return name in self._arrays

    def counts_by_name(self, name: str) -> dict[str, int]:
        """Returns numbers of 0 or more by table."""
        numbers = self._about.get(name)
        if not isinstance(numbers, dict):
            raise ValueError(f"{self._source} is damaged: {name} is {shown(numbers)}")
        return {table: self._count(name, value) for table, value in numbers.items()}

    def table_rows(self) -> dict[str, int]:
        """Returns the number of rows of each table."""
        return self.counts_by_name("table_rows")

    def ids(self, place: int, table: str) -> NDArray[np.int64]:
        """Returns rows of a table, every one of them once."""
        ids = self.counts(f"ids_{place}")
        rows = self.table_rows()[table]
        if len(ids) and int(ids.max()) >= rows:
            raise ValueError(
                f"{self._source} is damaged: it has row {ids.max()} of table {shown(table)}, "
                f"which has {rows} rows"
            )
        if len(np.unique(ids)) < len(ids):
            raise ValueError(
                f"{self._source} is damaged: it has a row of table {shown(table)} twice"
            )
        return ids

    def counts(self, name: str, length: int | None = None) -> NDArray[np.int64]:
        """Returns a list of numbers of 0 or more."""
        numbers = self._arrays.get(name)
        if numbers is None or numbers.dtype != np.int64 or numbers.ndim != 1:
            raise ValueError(f"{self._source} is damaged: {name} is missing, or no list of numbers")
        if length not in (None, len(numbers)):
            raise ValueError(f"{self._source} is damaged: {name} has {len(numbers)} numbers")
        if len(numbers) and int(numbers.min()) < 0:
            raise ValueError(f"{self._source} is damaged: {name} has {numbers.min()}")
        return numbers

    def _count(self, name: str, value: Any) -> int:
        if type(value) is not int or not 0 <= value < MOST_ROWS:
            raise ValueError(
                f"{self._source} is damaged: {name} is {shown(value)}, must be 0 or more"
            )
        return value
