"""Reads any part of any tensor of a checkpoint, and no more than that part.

Files are mapped into memory: a row range of a large shard costs its own bytes only, so tables can
be converted and exported that do not fit into memory.
"""

import io
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


class CheckpointReader:
    """A checkpoint of torch.distributed.checkpoint, of whatever sharding and number of ranks.

    Args:
        path: its folder.

    Raises:
        ValueError: the folder holds no checkpoint, or it is damaged.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._items: dict[MetadataIndex, torch.Tensor] = {}

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
            into[here].copy_(self.chunk(name, chunk)[there])
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

    def files_of(self, name: str) -> list[str]:
        """Files with parts of a tensor or object."""
        return sorted(
            {
                info.relative_path
                for index, info in self.metadata.storage_data.items()
                if index.fqn == name
            }
        )

    def _info(self, index: MetadataIndex) -> Any:
        try:
            return self.metadata.storage_data[index]
        except KeyError:
            raise ValueError(
                f"{self.path}: the metadata does not tell where {index.fqn!r} is"
            ) from None

    def _bytes_of(self, index: MetadataIndex) -> bytes:
        info = self._info(index)
        path = self.path / info.relative_path
        try:
            with path.open("rb") as file:
                file.seek(info.offset)
                content = file.read(info.length)
        except OSError as error:
            raise ValueError(f"{path} cannot be read: {error}") from None
        if len(content) < info.length:
            raise ValueError(f"{path} is truncated: {index.fqn!r} ends after its end")
        return content

    def chunk(self, name: str, chunk: ChunkStorageMetadata) -> torch.Tensor:
        """A chunk, mapped into memory."""
        index = MetadataIndex(name, chunk.offsets)
        if index not in self._items:
            info = self._info(index)
            path = self.path / info.relative_path
            try:
                self._items[index] = _mapped(path, info, chunk, self.tensors[name])
            except (OSError, ValueError, RuntimeError, EOFError) as error:
                raise ValueError(f"{path} cannot be read: {error} ({name!r})") from None
        return self._items[index]


def _mapped(
    path: Path, info: Any, chunk: ChunkStorageMetadata, about: TensorStorageMetadata
) -> torch.Tensor:
    if path.stat().st_size < info.offset + info.length:
        raise ValueError("it is truncated")
    with path.open("rb") as file:
        part: Any = _Part(file, info.offset, info.length)
        if info.transform_descriptors:
            raise ValueError(f"it was written with {info.transform_descriptors}")
        # On the meta device nothing is read but what describes the tensor.
        meta = torch.load(part, map_location="meta", weights_only=True)
        if not isinstance(meta, torch.Tensor) or meta.shape != chunk.sizes:
            raise ValueError("it holds another tensor than the metadata says")
        if not meta.is_contiguous() or meta.storage_offset() or meta.dtype.is_complex:
            part.seek(0)
            loaded: torch.Tensor = torch.load(part, map_location="cpu", weights_only=True)
            return loaded
        part.seek(0)
        file_of_tensor: Any = torch._C.PyTorchFileReader(part)
        start = file_of_tensor.get_record_offset("data/0")
    size = meta.numel() * meta.element_size()
    if start + size > info.length:
        raise ValueError("it is truncated")
    if not size:
        return torch.empty(meta.shape, dtype=meta.dtype)
    mapped = np.memmap(path, dtype=np.uint8, mode="c", offset=info.offset + start, shape=(size,))
    if meta.dtype != about.properties.dtype:
        raise ValueError(f"it holds {meta.dtype}, the metadata says {about.properties.dtype}")
    flat = torch.frombuffer(mapped, dtype=torch.uint8)
    if (info.offset + start) % meta.element_size():
        flat = flat.clone()
    return flat.view(meta.dtype).view(meta.shape)


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
