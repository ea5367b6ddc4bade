"""Reads what ``torch.save`` wrote, without torch's own loader.

Such a file is a zip archive with a pickle that describes the object (``data.pkl``) and a record of
plain numbers for each storage (``data/0``).  The pickle is read as a description.  A tensor is its
type, shape, strides and a place in the file, all of which are checked against the record; so
nothing is allocated that is not in the file.  ``torch.serialization.add_safe_globals`` makes no
difference here.
"""

import io
import math
import sys
import zipfile
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from fusedrec_torchrec.checkpoint.dtypes import DTYPES, STORAGES, UNTYPED
from fusedrec_torchrec.checkpoint.inert_pickle import Call, Name, Pairs, Persistent
from fusedrec_torchrec.core.folder_files import shown

__all__ = ["TENSOR_NAMES", "TensorInFile", "TorchFile", "tensor_in_file"]

LARGEST_PICKLE = 64 << 20  # bytes
MOST_DIMENSIONS = 16
REBUILD = "torch._utils._rebuild_tensor_v2"
REBUILD_WITH_DTYPE = "torch._utils._rebuild_tensor_v3"
TENSOR_NAMES = frozenset(
    {REBUILD, REBUILD_WITH_DTYPE, UNTYPED, "collections.OrderedDict", *STORAGES, *DTYPES}
)
LOCAL_HEADER = 30  # bytes, before the name
File = io.BufferedReader | io.BytesIO


class TorchFile:
    """The records of what ``torch.save`` wrote into a section of a file.

    Args:
        file: that holds it.
        offset: where it begins.
        length: of it, in bytes.

    Raises:
        ValueError: it is truncated, or no such archive.
    """

    def __init__(self, file: File, offset: int, length: int) -> None:
        if file.seek(0, io.SEEK_END) < offset + length:
            raise ValueError("it is truncated")
        self._section = _FileSection(file, offset, length)
        try:
            with zipfile.ZipFile(self._section) as archive:
                records = archive.infolist()
        except Exception as error:  # a damaged archive can raise anything
            raise ValueError(f"it is no archive of torch.save: {error}") from None
        self._records: dict[str, tuple[int, int]] = {}
        end = 0
        for info in sorted(records, key=lambda info: info.header_offset):
            start, size = self._place(info)
            name = info.filename.partition("/")[2]
            if name in self._records or info.header_offset < end:
                raise ValueError(f"record {shown(name)} of its archive overlaps another one")
            self._records[name] = (start, size)
            end = start + size
        if "byteorder" in self._records and self.read("byteorder", 16) != sys.byteorder.encode():
            raise ValueError(f"its numbers are not {sys.byteorder}-endian")

    def _place(self, info: zipfile.ZipInfo) -> tuple[int, int]:
        """Returns where the bytes of a record begin, and how many there are."""
        if info.compress_type != zipfile.ZIP_STORED or info.file_size != info.compress_size:
            raise ValueError(f"record {shown(info.filename)} of its archive is compressed")
        if info.header_offset < 0:
            raise ValueError(f"record {shown(info.filename)} of its archive is not where it says")
        header = self._section.take(info.header_offset, LOCAL_HEADER)
        name_size, extra_size = (int.from_bytes(header[i : i + 2], "little") for i in (26, 28))
        start = info.header_offset + LOCAL_HEADER + name_size + extra_size
        name = self._section.take(info.header_offset + LOCAL_HEADER, name_size)
        if header[:4] != b"PK\3\4" or name != info.orig_filename.encode():
            raise ValueError(f"record {shown(info.filename)} of its archive is not where it says")
        if start + info.file_size > self._section.length:
            raise ValueError("it is truncated")
        return start, info.file_size

    def place(self, name: str) -> tuple[int, int]:
        """Returns where a record begins in the section, and its number of bytes."""
        if name not in self._records:
            raise ValueError(f"its archive has no record {shown(name)}")
        return self._records[name]

    def read(self, name: str, most: int) -> bytes:
        """Returns the bytes of a record."""
        start, size = self.place(name)
        if size > most:
            raise ValueError(
                f"record {shown(name)} of its archive has {size} bytes, may have {most}"
            )
        return self._section.take(start, size)

    @property
    def pickle(self) -> bytes:
        """The pickle that describes the object."""
        return self.read("data.pkl", LARGEST_PICKLE)


@dataclass(frozen=True)
class TensorInFile:
    """A tensor, as a place in a file.

    Attributes:
        dtype: of its elements.
        shape: of it.
        strides: in elements.
        first: its first element in the storage.
        storage: name of the record that holds its storage.
    """

    dtype: torch.dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    first: int
    storage: str

    def numbers(self, storage: NDArray[np.uint8]) -> NDArray[Any]:
        """Returns the bits of its elements, a view of the bytes of its storage."""
        size = self.dtype.itemsize
        kind = np.dtype(np.complex128) if size == 16 else np.dtype(f"u{size}")
        if not math.prod(self.shape):
            return np.empty(self.shape, kind)
        # NumPy checks that all of it is inside of the buffer.
        return np.ndarray(
            self.shape,
            kind,
            buffer=storage.data,
            offset=self.first * size,
            strides=tuple(stride * size for stride in self.strides),
        )


def tensor_in_file(described: Any, file: TorchFile) -> TensorInFile:
    """Returns the tensor that a pickle describes.

    Raises:
        ValueError: it describes something else, or a tensor that is not all in the file.
    """
    if type(described) is not Call or described.name not in (REBUILD, REBUILD_WITH_DTYPE):
        what = described.name if type(described) is Call else type(described).__name__
        raise ValueError(f"it holds {what}, must hold a tensor of plain numbers")
    arguments = list(described.arguments)
    dtype = None
    if described.name == REBUILD_WITH_DTYPE and len(arguments) > 6:
        dtype = arguments.pop(6)
        if type(dtype) is not Name or dtype.full not in DTYPES:
            raise ValueError("it holds a tensor of an unknown type")
    if len(arguments) not in (6, 7) or arguments[6:] not in ([], [None], [Pairs()]):
        raise ValueError("it holds a tensor that is more than plain numbers")
    if type(arguments[5]) is not Call or arguments[5].items:
        raise ValueError("it holds a tensor with hooks")
    key, stored_type, elements = _storage(arguments[0])
    kind = stored_type if dtype is None else DTYPES[dtype.full]
    if kind is None:
        raise ValueError("it holds a tensor without a type")
    first, shape, strides = arguments[1:4]
    for numbers in (shape, strides):
        if type(numbers) is not tuple or len(numbers) > MOST_DIMENSIONS:
            raise ValueError("it holds a tensor without shape or strides")
    for number in (first, *shape, *strides):
        if type(number) is not int or not 0 <= number < 1 << 60:
            raise ValueError("it holds a tensor whose shape or strides are no whole numbers")
    if len(shape) != len(strides):
        raise ValueError("it holds a tensor with more strides than dimensions, or fewer")
    size = elements * (1 if stored_type is None else stored_type.itemsize)
    if file.place(f"data/{key}")[1] != size:
        raise ValueError(f"it has another number of bytes in data/{shown(key)[1:-1]} than it says")
    _check_inside(shape, strides, first, size // kind.itemsize)
    return TensorInFile(kind, shape, strides, first, f"data/{key}")


def _storage(described: Any) -> tuple[str, torch.dtype | None, int]:
    """Returns key, type and elements (without a type, bytes) of a storage."""
    identity = described.identity if type(described) is Persistent else ()
    if type(identity) is not tuple or len(identity) != 5 or identity[0] != "storage":
        raise ValueError("it holds a tensor without a storage")
    _, kind, key, _, elements = identity
    if type(kind) is not Name or kind.full not in (*STORAGES, UNTYPED) or type(key) is not str:
        raise ValueError("it holds a tensor with an unknown storage")
    if type(elements) is not int or not 0 <= elements < 1 << 60:
        raise ValueError("it holds a tensor with a storage of an unknown size")
    return key, STORAGES.get(kind.full), elements


def _check_inside(
    shape: tuple[int, ...], strides: tuple[int, ...], first: int, elements: int
) -> None:
    """Checks that no element is outside of the storage, nor more than the storage has."""
    product = math.prod(shape)
    if not product:
        return
    last = first + sum((length - 1) * stride for length, stride in zip(shape, strides, strict=True))
    if last >= elements or product > elements:
        raise ValueError(
            f"it holds a tensor of shape {shown(list(shape))} in a storage of {elements} elements"
        )


class _FileSection(io.RawIOBase):
    """A section of a file, as a file of its own."""

    def __init__(self, file: File, offset: int, length: int) -> None:
        super().__init__()
        self._file, self._offset, self.length = file, offset, length
        self._at = 0

    def take(self, at: int, count: int) -> bytes:
        """Returns bytes at a place; fewer where the section ends."""
        self.seek(at)
        return self.read(count)

    def read(self, size: int = -1) -> bytes:
        """Reads bytes; allocates no more than there are, whatever an archive says of its sizes."""
        left = max(self.length - self._at, 0)
        return super().read(left if size < 0 else min(size, left)) or b""

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, to: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self.length}[whence]
        self._at = max(base + to, 0)
        return self._at

    def readinto(self, buffer: Any) -> int:
        self._file.seek(self._offset + self._at)
        view = memoryview(buffer)[: max(self.length - self._at, 0)]
        count = self._file.readinto(view)
        self._at += count
        return count
