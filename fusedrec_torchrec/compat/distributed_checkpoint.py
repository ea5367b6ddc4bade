"""The names of torch.distributed.checkpoint's file format, and how it flattens state dicts."""

from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from torch.distributed.checkpoint._traverse import OBJ_PATH, set_element
from torch.distributed.checkpoint.filesystem import _StorageInfo as StorageInfo
from torch.distributed.checkpoint.filesystem import _StoragePrefix as StoragePrefix
from torch.distributed.checkpoint.metadata import _MEM_FORMAT_ENCODING as MEM_FORMAT_ENCODING

__all__ = [
    "MEM_FORMAT_ENCODING",
    "OBJ_PATH",
    "StorageInfo",
    "StoragePrefix",
    "flatten_state_dict",
    "set_element",
]
