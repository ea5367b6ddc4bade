"""Reads the metadata of torch.distributed.checkpoint without trusting it.

It is a pickle, and a pickle can run anything.  Here it is read as a description, of which metadata
is made field by field: each has the type it must have, chunks lie in their tensors and do not
overlap, and what is stored lies in files of the folder, each thing in its own place.  No more is
promised than that: whether the files are there and hold it is for the reader to see.
"""

import gc
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from fusedrec_torchrec.checkpoint.boxes import overlapping
from fusedrec_torchrec.checkpoint.dtypes import DTYPES
from fusedrec_torchrec.checkpoint.file_names import METADATA_FILE
from fusedrec_torchrec.checkpoint.inert_pickle import Call, Name, Pairs, read_pickle
from fusedrec_torchrec.compat.distributed_checkpoint import MEM_FORMAT_ENCODING, StorageInfo
from fusedrec_torchrec.core.folder_files import check_file_name, read_in_folder, shown

__all__ = ["read_metadata"]

LARGEST_FILE = 256 << 20  # bytes, enough for a million chunks
MOST_ELEMENTS = 1 << 60  # of a tensor
MOST_DIMENSIONS = 16
LONGEST_TEXT = 4096  # characters
MODULE = "torch.distributed.checkpoint.metadata"
STORAGE_INFO = "torch.distributed.checkpoint.filesystem._StorageInfo"
MEMORY_FORMAT = f"{MODULE}._MEM_FORMAT_ENCODING"
MEMORY_FORMATS = {
    MEM_FORMAT_ENCODING.TORCH_CONTIGUOUS_FORMAT: torch.contiguous_format,
    MEM_FORMAT_ENCODING.TORCH_CHANNELS_LAST: torch.channels_last,
    MEM_FORMAT_ENCODING.TORCH_PRESERVE_FORMAT: torch.preserve_format,
}
ALLOWED = frozenset(
    {
        *("collections.OrderedDict", "builtins.getattr"),
        *("pathlib.Path", "pathlib.PosixPath", "pathlib.PurePosixPath"),
        *("torch.Size", "torch.serialization._get_layout"),
        *(
            f"{MODULE}.{name}"
            for name in (
                *("BytesStorageMetadata", "ChunkStorageMetadata", "Metadata", "MetadataIndex"),
                *("StorageMeta", "TensorProperties", "TensorStorageMetadata"),
            )
        ),
        *(MEMORY_FORMAT, STORAGE_INFO),
        *DTYPES,
    }
)


def read_metadata(path: Path) -> Metadata:
    """Returns the metadata of the checkpoint in a folder.

    Raises:
        ValueError: there is none, or it is damaged, or it holds what metadata does not need.
    """
    try:
        content = read_in_folder(path, METADATA_FILE, LARGEST_FILE)
    except (FileNotFoundError, NotADirectoryError):
        raise ValueError(
            f"{path} is no checkpoint of torch.distributed.checkpoint ({METADATA_FILE} is missing)"
        ) from None
    except OSError as error:
        raise ValueError(f"{path / METADATA_FILE} cannot be read: {error}") from None
    try:
        with _no_garbage_collection():
            return _metadata(read_pickle(content, ALLOWED))
    except ValueError as error:
        raise ValueError(f"{path / METADATA_FILE} cannot be read: {error}") from None


@contextmanager
def _no_garbage_collection() -> Iterator[None]:
    """Stops garbage collection, which would look through millions of objects again and again."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _metadata(described: Any) -> Metadata:
    if type(described) is not Call or described.name != f"{MODULE}.Metadata":
        raise ValueError("it is not the metadata of a checkpoint")
    allowed = ("state_dict_metadata", "planner_data", "storage_data", "storage_meta", "version")
    fields = _fields(described, f"{MODULE}.Metadata", allowed)
    pairs = _pairs(fields.get("state_dict_metadata"), "state_dict_metadata")
    stored = {_text(name, "a name"): _stored(name, about) for name, about in pairs}
    if len(stored) < len(pairs):
        raise ValueError("two things have the same name")
    storage = _storage_data(fields.get("storage_data"))
    _check_places(storage.values())
    _check_lengths(stored, storage)
    version = fields.get("version")
    return Metadata(
        state_dict_metadata=stored,
        planner_data=_planner_data(fields.get("planner_data")),
        storage_data=storage,
        storage_meta=None,  # where it was written, which is of no use here
        version=None if version is None else _text(version, "version"),
    )


# ---------------------------------------------------------------- tensors


def _stored(name: str, about: Any) -> TensorStorageMetadata | BytesStorageMetadata:
    if type(about) is Call and about.name == f"{MODULE}.BytesStorageMetadata":
        return BytesStorageMetadata()
    kind = f"{MODULE}.TensorStorageMetadata"
    fields = _fields(about, kind, ("properties", "size", "chunks"))
    size = _size(fields.get("size"))
    chunks = fields.get("chunks")
    if type(chunks) is not list:
        raise ValueError(f"{shown(name)} has no list of chunks")
    checked = [_chunk(name, chunk, size) for chunk in chunks]
    problem = overlapping([(chunk.offsets, chunk.sizes) for chunk in checked])
    if problem is not None:
        raise ValueError(f"{shown(name)}: {problem}")
    return TensorStorageMetadata(_properties(fields.get("properties")), size, checked)


def _chunk(name: str, described: Any, size: torch.Size) -> ChunkStorageMetadata:
    fields = _fields(described, f"{MODULE}.ChunkStorageMetadata", ("offsets", "sizes"))
    offsets, sizes = _size(fields.get("offsets")), _size(fields.get("sizes"))
    inside = len(offsets) == len(sizes) == len(size) and all(
        offset + length <= whole for offset, length, whole in zip(offsets, sizes, size, strict=True)
    )
    if not inside:
        raise ValueError(
            f"{shown(name)} of sizes {list(size)} has a chunk of sizes {list(sizes)} at "
            f"{list(offsets)}"
        )
    return ChunkStorageMetadata(offsets, sizes)


def _properties(described: Any) -> TensorProperties:
    kind = f"{MODULE}.TensorProperties"
    if type(described) is not Call or described.name != kind or type(described.state) is not tuple:
        raise ValueError("properties of a tensor are missing")
    if len(described.state) != 5:
        raise ValueError(f"a tensor has {len(described.state)} properties, must have 5")
    dtype, layout, requires_grad, memory_format, pin_memory = described.state
    if type(dtype) is not Name or dtype.full not in DTYPES:
        raise ValueError("the type of a tensor is none that a checkpoint has")
    if _call(layout, "torch.serialization._get_layout") != ("torch.strided",):
        raise ValueError("a tensor is not torch.strided")
    return TensorProperties(
        dtype=DTYPES[dtype.full],
        requires_grad=_flag(requires_grad),
        memory_format=MEMORY_FORMATS[_memory_format(memory_format)],
        pin_memory=_flag(pin_memory),
    )


def _memory_format(described: Any) -> MEM_FORMAT_ENCODING:
    """Returns a memory format, which some releases of Python 3.11 write as an attribute."""
    attribute = _call(described, "builtins.getattr")
    if attribute is not None:
        kind, name = attribute if len(attribute) == 2 else (None, None)
        if (
            kind != Name(MEMORY_FORMAT)
            or type(name) is not str
            or name not in MEM_FORMAT_ENCODING.__members__
        ):
            of = kind.full if type(kind) is Name else "something"
            raise ValueError(f"it wants {shown(name)} of {of}, which no checkpoint needs")
        return MEM_FORMAT_ENCODING[name]
    value = _call(described, MEMORY_FORMAT)
    members = {(member.value,): member for member in MEM_FORMAT_ENCODING}
    if value is None or len(value) != 1 or type(value[0]) is not int or value not in members:
        raise ValueError("the memory format of a tensor is none of torch's")
    return members[value]


# ---------------------------------------------------------------- where they are


def _storage_data(described: Any) -> dict[MetadataIndex, StorageInfo]:
    storage: dict[MetadataIndex, StorageInfo] = {}
    for index, info in _pairs(described, "storage_data"):
        fields = _fields(index, f"{MODULE}.MetadataIndex", ("fqn", "offset", "index"))
        name, offset = _text(fields.get("fqn"), "a name"), fields.get("offset")
        place = MetadataIndex(name, None if offset is None else _size(offset))
        if place in storage:
            raise ValueError(f"{shown(name)} is stored twice")
        storage[place] = _info(info)
    return storage


def _info(described: Any) -> StorageInfo:
    allowed = ("relative_path", "offset", "length", "transform_descriptors")
    fields = _fields(described, STORAGE_INFO, allowed)
    transforms = fields.get("transform_descriptors")
    if transforms is not None:
        if type(transforms) not in (list, tuple):
            raise ValueError("transform_descriptors is no list")
        transforms = [_text(transform, "a transform") for transform in transforms]
    return StorageInfo(
        relative_path=check_file_name(fields.get("relative_path"), "the metadata"),
        offset=_count(fields.get("offset")),
        length=_count(fields.get("length")),
        transform_descriptors=transforms,
    )


def _check_places(infos: Iterable[StorageInfo]) -> None:
    """Checks that nothing shares a place in a file, so that all is no larger than the files."""
    ends: dict[str, int] = {}
    for info in sorted(infos, key=lambda info: (info.relative_path, info.offset)):
        if info.offset < ends.get(info.relative_path, 0):
            raise ValueError(f"two things are stored in {info.relative_path} at byte {info.offset}")
        ends[info.relative_path] = info.offset + info.length


def _check_lengths(
    stored: dict[str, TensorStorageMetadata | BytesStorageMetadata],
    storage: dict[MetadataIndex, StorageInfo],
) -> None:
    """Checks that no tensor is larger than what is stored of it."""
    for name, about in stored.items():
        if isinstance(about, TensorStorageMetadata):
            itemsize = about.properties.dtype.itemsize
            for chunk in about.chunks:
                info = storage.get(MetadataIndex(name, chunk.offsets))
                if info is not None and info.length < chunk.sizes.numel() * itemsize:
                    raise ValueError(
                        f"{shown(name)} has a chunk of sizes {list(chunk.sizes)}, which is stored "
                        f"in {info.length} bytes"
                    )


def _planner_data(described: Any) -> dict[str, tuple[str | int, ...]] | None:
    """Returns the path to each name in the nested state dict."""
    if described is None:
        return None
    paths = {}
    for name, path in _pairs(described, "planner_data"):
        if type(path) is not tuple or not all(type(key) in (str, int) for key in path):
            raise ValueError(f"planner_data has no path of names for {shown(name)}")
        paths[_text(name, "a name")] = path
    return paths


# ---------------------------------------------------------------- fields


def _fields(described: Any, kind: str, allowed: Sequence[str]) -> dict[str, Any]:
    """Returns the fields that a description sets of an instance of a class."""
    if type(described) is not Call or described.name != kind:
        raise ValueError(f"there must be a {kind.rpartition('.')[2]}, and is something else")
    fields = {}
    for name, value in _pairs(described.state, kind):
        if name not in allowed:
            raise ValueError(
                f"{kind.rpartition('.')[2]} has the field {shown(name)}, must have "
                f"some of {', '.join(allowed)}"
            )
        fields[name] = value
    return fields


def _pairs(described: Any, what: str) -> Pairs:
    if type(described) is not Pairs:
        raise ValueError(f"{what} is no dict")
    return described


def _call(described: Any, name: str) -> tuple[Any, ...] | None:
    """Returns the arguments of a call of this name; None if it is something else."""
    if type(described) is Call and described.name == name and described.state is None:
        return described.arguments
    return None


def _size(described: Any) -> torch.Size:
    arguments = _call(described, "torch.Size")
    if arguments is None or len(arguments) != 1 or type(arguments[0]) is not tuple:
        raise ValueError("a torch.Size is missing")
    elements = 1
    for length in arguments[0]:
        elements *= max(_count(length), 1)
    if elements > MOST_ELEMENTS or len(arguments[0]) > MOST_DIMENSIONS:
        raise ValueError(f"a tensor has more than {MOST_ELEMENTS} elements, or too many dimensions")
    return torch.Size(arguments[0])


def _count(value: Any) -> int:
    if type(value) is not int or not 0 <= value < MOST_ELEMENTS:
        raise ValueError(f"{shown(value)} must be a whole number of 0 or more")
    return value


def _text(value: Any, what: str) -> str:
    if type(value) is not str or len(value) > LONGEST_TEXT or not value.isprintable():
        raise ValueError(
            f"{what} is {shown(value)}, must be a printable text of {LONGEST_TEXT} characters at "
            "most"
        )
    return value


def _flag(value: Any) -> bool:
    if type(value) is not bool:
        raise ValueError(f"{shown(value)} must be true or false")
    return value
