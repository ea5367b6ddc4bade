"""The metadata of torch.distributed.checkpoint, read without trusting it.

It is a pickle, and a pickle can run anything.  Here only the classes that metadata is made of may
be built; a file that names others is refused.
"""

import io
import pickle
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint.metadata import _MEM_FORMAT_ENCODING, Metadata

__all__ = ["read_metadata"]

METADATA_FILE = ".metadata"
ALLOWED = {
    ("collections", "OrderedDict"),
    ("pathlib", "Path"),
    ("pathlib", "PosixPath"),
    ("pathlib", "PurePosixPath"),
    ("torch", "Size"),
    ("torch.serialization", "_get_layout"),
    *(
        ("torch.distributed.checkpoint.metadata", name)
        for name in (
            *("BytesStorageMetadata", "ChunkStorageMetadata", "Metadata", "MetadataIndex"),
            *("StorageMeta", "TensorProperties", "TensorStorageMetadata", "_MEM_FORMAT_ENCODING"),
        )
    ),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    *(
        ("torch", name)
        for name in (
            *("float32", "float64", "float16", "bfloat16", "uint8", "int8", "int16", "int32"),
            *("int64", "bool", "complex64", "complex128"),
        )
    ),
}


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("builtins", "getattr"):
            return _memory_format
        if (module, name) not in ALLOWED:
            raise pickle.UnpicklingError(f"it names {module}.{name}, which no checkpoint needs")
        return super().find_class(module, name)


def _memory_format(kind: Any, name: str) -> Any:
    """Some releases of Python 3.11 write members of an enumeration as attributes of it."""
    if kind is not _MEM_FORMAT_ENCODING or name not in kind.__members__:
        raise pickle.UnpicklingError(f"it wants {name!r} of {kind}, which no checkpoint needs")
    return kind[name]


def read_metadata(path: Path) -> Metadata:
    """The metadata of the checkpoint in a folder.

    Raises:
        ValueError: there is none, or it is damaged, or it holds what metadata does not need.
    """
    try:
        content = (path / METADATA_FILE).read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        raise ValueError(
            f"{path} is no checkpoint of torch.distributed.checkpoint ({METADATA_FILE} is missing)"
        ) from None
    except OSError as error:
        raise ValueError(f"{path / METADATA_FILE} cannot be read: {error}") from None
    try:
        metadata = _Unpickler(io.BytesIO(content)).load()
    except Exception as error:  # a damaged pickle can raise anything
        raise ValueError(f"{path / METADATA_FILE} cannot be read: {error}") from None
    if not isinstance(metadata, Metadata) or not isinstance(metadata.storage_data, dict):
        raise ValueError(f"{path / METADATA_FILE} is not the metadata of a checkpoint")
    return metadata
