"""Reads any box of any tensor of a checkpoint, and no more than that.

Files are mapped into memory: a row range of a large shard costs its own bytes only, so tables can
be converted and exported that do not fit into memory.
"""

import io
import os
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorStorageMetadata,
)

from fusedrec_torchrec.checkpoint.inert_pickle import read_pickle
from fusedrec_torchrec.checkpoint.plain_objects import read_object
from fusedrec_torchrec.checkpoint.safe_metadata import read_metadata
from fusedrec_torchrec.checkpoint.torch_file import TENSOR_NAMES, TorchFile, tensor_in_file
from fusedrec_torchrec.compat.distributed_checkpoint import StorageInfo
from fusedrec_torchrec.core.folder_files import open_in_folder, shown

__all__ = ["CheckpointReader"]

MOST_MAPPED = 64  # chunks at a time: a process may not map without end


class CheckpointReader:
    """Reads a checkpoint of torch.distributed.checkpoint, of whatever sharding and ranks.

    Args:
        path: its folder.

    Raises:
        ValueError: the folder holds no checkpoint, or it is damaged.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._mapped: OrderedDict[MetadataIndex, _MappedChunk] = OrderedDict()

    @cached_property
    def metadata(self) -> Metadata:
        """What torch.distributed.checkpoint wrote about the checkpoint."""
        return read_metadata(self.path)

    @cached_property
    def tensors(self) -> Mapping[str, TensorStorageMetadata]:
        """What the metadata says of each tensor, by name."""
        stored = self.metadata.state_dict_metadata
        return {k: v for k, v in stored.items() if isinstance(v, TensorStorageMetadata)}

    @cached_property
    def objects(self) -> Sequence[str]:
        """Names of all that is not a tensor."""
        stored = self.metadata.state_dict_metadata
        return [k for k, v in stored.items() if isinstance(v, BytesStorageMetadata)]

    def read(self, name: str, offsets: Sequence[int], into: torch.Tensor) -> None:
        """Fills a tensor with the box of ``name`` that begins at ``offsets``.

        Raises:
            ValueError: a file is missing or damaged, or the box is not all there.
        """
        covered = 0  # chunks do not overlap: the metadata would have been refused
        for chunk in self.tensors[name].chunks:
            overlap = _overlap(chunk, offsets, into.shape)
            if overlap is None:
                continue
            there, here = overlap
            into[here].copy_(self._chunk(name, chunk).box(there))
            covered += into[here].numel()
        if covered != into.numel():
            raise self._incomplete(f"{name} at {list(offsets)}", covered, into.numel())

    def whole(self, name: str) -> torch.Tensor:
        """Returns all of a tensor, which should be a small one."""
        about = self.tensors[name]
        stored = sum(chunk.sizes.numel() for chunk in about.chunks)
        if stored != about.size.numel():
            raise self._incomplete(name, stored, about.size.numel())
        for chunk in about.chunks:  # nothing is allocated for what is not in a file
            self.check(name, chunk)
        result = torch.empty(about.size, dtype=about.properties.dtype)
        self.read(name, [0] * len(about.size), result)
        return result

    def object(self, name: str) -> Any:
        """Returns an object that is not a tensor, if it is made of plain data.

        Raises:
            ValueError: it is not, or the file is missing or damaged.
        """
        return self._object(name)[0]

    def content(self, name: str) -> bytes:
        """Returns an object that is not a tensor as it is stored; it must be made of plain data.

        Raises:
            ValueError: it is not, or the file is missing or damaged.
        """
        return self._object(name)[1]

    def check_sizes(self) -> None:
        """Checks that all files are there, and no shorter than the metadata says.

        Raises:
            ValueError: a file is missing, or is shorter than the metadata says.
        """
        ends: dict[str, StorageInfo] = {}
        for info in self.metadata.storage_data.values():
            last = ends.setdefault(info.relative_path, info)
            if info.offset > last.offset:
                ends[info.relative_path] = info
        for info in ends.values():
            with self._open(info) as file:
                if os.fstat(file.fileno()).st_size < info.offset + info.length:
                    raise ValueError(f"{self.path / info.relative_path} is truncated")

    def _object(self, name: str) -> tuple[Any, bytes]:
        """Returns an object that is not a tensor, and the bytes that it was made of."""
        info = self._info(MetadataIndex(name))
        with self._open(info) as file:
            try:
                if os.fstat(file.fileno()).st_size < info.offset + info.length:
                    raise ValueError("it is truncated")
                file.seek(info.offset)
                content = file.read(info.length)
                return read_object(TorchFile(io.BytesIO(content), 0, len(content))), content
            except (OSError, ValueError) as error:
                raise ValueError(
                    f"{self.path / info.relative_path} cannot be read: {error} ({name!r})"
                ) from None

    def _incomplete(self, name: str, stored: int, wanted: int) -> ValueError:
        return ValueError(
            f"{self.path}: {stored} of {wanted} elements of {name} are in the checkpoint"
        )

    def _info(self, index: MetadataIndex) -> StorageInfo:
        try:
            return self.metadata.storage_data[index]
        except KeyError:
            raise ValueError(
                f"{self.path}: the metadata does not tell where {index.fqn!r} is"
            ) from None

    def check(self, name: str, chunk: ChunkStorageMetadata) -> None:
        """Checks that a chunk of a tensor is where the metadata says.

        Raises:
            ValueError: a chunk of a tensor is not where the metadata says, or is something else.
        """
        if chunk.sizes.numel():  # one without elements may be at the place of another
            self._chunk(name, chunk)

    def _chunk(self, name: str, chunk: ChunkStorageMetadata) -> "_MappedChunk":
        """Returns a chunk, mapped into memory; some of the last ones stay mapped."""
        index = MetadataIndex(name, chunk.offsets)
        if index in self._mapped:
            self._mapped.move_to_end(index)
            return self._mapped[index]
        info = self._info(index)
        dtype = self.tensors[name].properties.dtype
        with self._open(info) as file:
            try:
                mapped = _MappedChunk(file, info, chunk, dtype)
            except (OSError, ValueError) as error:
                raise ValueError(
                    f"{self.path / info.relative_path} cannot be read: {error} ({name!r})"
                ) from None
        self._mapped[index] = mapped
        if len(self._mapped) > MOST_MAPPED:
            self._mapped.popitem(last=False)
        return mapped

    def _open(self, info: StorageInfo) -> io.BufferedReader:
        """Opens a file of the checkpoint, and of nothing else."""
        try:
            return open_in_folder(self.path, info.relative_path)
        except OSError as error:
            raise ValueError(
                f"{self.path / info.relative_path} cannot be read: {error.strerror}"
            ) from None


class _MappedChunk:
    """A chunk in a file of ``torch.save``, whose numbers are mapped into memory.

    Raises:
        ValueError: the file is truncated, or holds something else.
    """

    def __init__(
        self,
        file: io.BufferedReader,
        info: StorageInfo,
        chunk: ChunkStorageMetadata,
        dtype: torch.dtype,
    ) -> None:
        if info.transform_descriptors:
            raise ValueError(f"it was written with {shown(info.transform_descriptors)}")
        records = TorchFile(file, info.offset, info.length)
        tensor = tensor_in_file(read_pickle(records.pickle, TENSOR_NAMES), records)
        if tensor.shape != tuple(chunk.sizes):
            raise ValueError("it holds another tensor than the metadata says")
        if tensor.dtype != dtype:
            raise ValueError(f"it holds {tensor.dtype}, the metadata says {dtype}")
        self._dtype = dtype
        start, size = records.place(tensor.storage)
        storage: NDArray[np.uint8] = np.empty(0, np.uint8)
        if size:
            # Copied where it is written to, which it never is; torch wants it to be possible.
            place = info.offset + start
            storage = np.memmap(file, np.uint8, mode="c", offset=place, shape=(size,))
        self._numbers = tensor.numbers(storage)

    def box(self, where: tuple[slice, ...]) -> torch.Tensor:
        """Returns a box of the chunk."""
        numbers = self._numbers[where] if where else self._numbers.reshape(())
        # Numbers of one chunk after another need not stand where their type wants them.
        aligned = numbers if numbers.flags.aligned else np.array(numbers)
        return torch.from_numpy(np.asarray(aligned)).view(self._dtype)


def _overlap(
    chunk: ChunkStorageMetadata, offsets: Sequence[int], sizes: Sequence[int]
) -> tuple[tuple[slice, ...], tuple[slice, ...]] | None:
    """Returns where chunk and box overlap, in the chunk and in the box; None if they do not."""
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
