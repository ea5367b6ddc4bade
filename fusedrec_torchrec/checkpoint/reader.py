"""Reads any part of any tensor of a checkpoint, and no more than that part.

Files are mapped into memory: a row range of a large shard costs its own bytes only, so tables can
be converted and exported that do not fit into memory.
"""

import io
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorStorageMetadata,
)

from fusedrec_torchrec.checkpoint.safe_metadata import read_metadata

__all__ = ["CheckpointReader"]

MOST_MAPPED = 64  # chunks at a time: a process may not map without end


class CheckpointReader:
    """A checkpoint of torch.distributed.checkpoint, of whatever sharding and number of ranks.

    Args:
        path: its folder.

    Raises:
        ValueError: the folder holds no checkpoint, or it is damaged.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._mapped: OrderedDict[MetadataIndex, _Stored] = OrderedDict()

    @cached_property
    def metadata(self) -> Metadata:
        return read_metadata(self.path)

    @cached_property
    def tensors(self) -> Mapping[str, TensorStorageMetadata]:
        """By name."""
        stored = self.metadata.state_dict_metadata
        return {k: v for k, v in stored.items() if isinstance(v, TensorStorageMetadata)}

    @cached_property
    def objects(self) -> Sequence[str]:
        """Names of what is not a tensor."""
        stored = self.metadata.state_dict_metadata
        return [k for k, v in stored.items() if isinstance(v, BytesStorageMetadata)]

    def read(self, name: str, offsets: Sequence[int], into: torch.Tensor) -> None:
        """Fills a tensor with the box of ``name`` that begins at ``offsets``.

        Raises:
            ValueError: a file is missing or damaged, or the box is not all there.
        """
        covered = 0
        for chunk in self.tensors[name].chunks:
            found = _overlap(chunk, offsets, into.shape)
            if found is None:
                continue
            there, here = found
            into[here].copy_(self._chunk(name, chunk).part(there))
            covered += into[here].numel()
        if covered != into.numel():
            raise ValueError(
                f"{self.path}: {covered} of {into.numel()} elements of {name!r} at "
                f"{list(offsets)} are in the checkpoint"
            )

    def whole(self, name: str) -> torch.Tensor:
        """All of a tensor; for small ones."""
        about = self.tensors[name]
        result = torch.empty(about.size, dtype=about.properties.dtype)
        self.read(name, [0] * len(about.size), result)
        return result

    def object(self, name: str) -> Any:
        """What is not a tensor, if it is made of plain data."""
        content = self._bytes_of(MetadataIndex(name))
        try:
            return torch.load(io.BytesIO(content), weights_only=True)
        except Exception as error:  # a damaged file can raise anything
            raise ValueError(f"{self.path}: {name!r} cannot be read: {error}") from None

    def content(self, name: str) -> bytes:
        """What is not a tensor, as it is stored."""
        return self._bytes_of(MetadataIndex(name))

    def _info(self, index: MetadataIndex) -> Any:
        try:
            return self.metadata.storage_data[index]
        except KeyError:
            raise ValueError(
                f"{self.path}: the metadata does not tell where {index.fqn!r} is"
            ) from None

    def _bytes_of(self, index: MetadataIndex) -> bytes:
        info = self._info(index)
        path = self._file(info)
        try:
            with path.open("rb") as file:
                file.seek(info.offset)
                content = file.read(info.length)
        except OSError as error:
            raise ValueError(f"{path} cannot be read: {error}") from None
        if len(content) < info.length:
            raise ValueError(f"{path} is truncated: {index.fqn!r} ends after its end")
        return content

    def check(self, name: str, chunk: ChunkStorageMetadata) -> None:
        """
        Raises:
            ValueError: a chunk of a tensor is not where the metadata says, or is something else.
        """
        self._chunk(name, chunk)

    def _chunk(self, name: str, chunk: ChunkStorageMetadata) -> "_Stored":
        """A chunk, mapped into memory; some of the last ones stay mapped."""
        index = MetadataIndex(name, chunk.offsets)
        if index in self._mapped:
            self._mapped.move_to_end(index)
            return self._mapped[index]
        info = self._info(index)
        path = self._file(info)
        try:
            found = _Stored(path, info, chunk, self.tensors[name].properties.dtype)
        except Exception as error:  # a damaged file can raise anything
            raise ValueError(f"{path} cannot be read: {_first_line(error)} ({name!r})") from None
        self._mapped[index] = found
        if len(self._mapped) > MOST_MAPPED:
            self._mapped.popitem(last=False)
        return found

    def _file(self, info: Any) -> Path:
        """A file of the checkpoint, and of nothing else."""
        name = str(info.relative_path)
        if Path(name).name != name:
            raise ValueError(f"{self.path}: the metadata names {name!r}, which is no file in it")
        return self.path / name


class _Stored:
    """A chunk in a file: ``torch.save``'s, whose numbers are mapped into memory.

    Raises:
        ValueError: the file is truncated, or holds something else.
    """

    def __init__(
        self, path: Path, info: Any, chunk: ChunkStorageMetadata, dtype: torch.dtype
    ) -> None:
        self._dtype = dtype
        self._whole: torch.Tensor | None = None
        if path.stat().st_size < info.offset + info.length:
            raise ValueError("it is truncated")
        if info.transform_descriptors:
            raise ValueError(f"it was written with {info.transform_descriptors}")
        with path.open("rb") as file:
            part: Any = _Part(file, info.offset, info.length)
            # On the meta device nothing is read but what describes the tensor.
            meta = torch.load(part, map_location="meta", weights_only=True)
            if not isinstance(meta, torch.Tensor) or meta.shape != chunk.sizes:
                raise ValueError("it holds another tensor than the metadata says")
            if meta.dtype != dtype:
                raise ValueError(f"it holds {meta.dtype}, the metadata says {dtype}")
            part.seek(0)
            if not meta.is_contiguous() or meta.storage_offset() or meta.dtype.is_complex:
                self._whole = torch.load(part, map_location="cpu", weights_only=True)
                return
            file_of_tensor: Any = torch._C.PyTorchFileReader(part)
            start = file_of_tensor.get_record_offset("data/0")
        size = meta.numel() * meta.element_size()
        if start + size > info.length:
            raise ValueError("it is truncated")
        if not size:
            self._whole = torch.empty(meta.shape, dtype=dtype)
            return
        self._numbers = np.memmap(
            path,
            dtype=np.dtype(f"u{dtype.itemsize}"),  # whatever they are, their bits
            mode="c",
            offset=info.offset + start,
            shape=tuple(meta.shape),
        )

    def part(self, where: tuple[slice, ...]) -> torch.Tensor:
        if self._whole is not None:
            return self._whole[where]
        found = self._numbers[where] if where else self._numbers.reshape(())
        # Numbers of one chunk after another need not stand where their type wants them.
        aligned = found if found.flags.aligned else np.array(found)
        return torch.from_numpy(np.asarray(aligned)).view(self._dtype)


def _first_line(error: Exception) -> str:
    """Without advice to load it in ways that are not safe."""
    return str(error).strip().partition("\n")[0].partition(" (1) ")[0] or type(error).__name__


def _overlap(
    chunk: ChunkStorageMetadata, offsets: Sequence[int], sizes: Sequence[int]
) -> tuple[tuple[slice, ...], tuple[slice, ...]] | None:
    """Where chunk and box overlap, in the chunk and in the box; None if they do not."""
    there, here = [], []
    for c_begin, c_size, begin, size in zip(
        chunk.offsets, chunk.sizes, offsets, sizes, strict=True
    ):
        low, high = max(c_begin, begin), min(c_begin + c_size, begin + size)
        if low >= high:
            return None
        there.append(slice(low - c_begin, high - c_begin))
        here.append(slice(low - begin, high - begin))
    return tuple(there), tuple(here)


class _Part(io.RawIOBase):
    """A part of a file, as a file."""

    def __init__(self, file: io.BufferedReader, offset: int, length: int) -> None:
        super().__init__()
        self._file, self._offset, self._length = file, offset, length
        self._at = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, to: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._length}[whence]
        self._at = max(base + to, 0)
        return self._at

    def readinto(self, buffer: Any) -> int:
        self._file.seek(self._offset + self._at)
        view = memoryview(buffer)[: max(self._length - self._at, 0)]
        count = self._file.readinto(view)
        self._at += count
        return count
