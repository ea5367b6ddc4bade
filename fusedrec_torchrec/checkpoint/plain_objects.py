"""Reads what is not a tensor in a checkpoint, if it is made of plain data.

Settings of optimizers and the like: numbers, texts, lists, dicts, and tensors among them.  Objects
of classes are refused, whatever ``torch.serialization.add_safe_globals`` allows in this process.
"""

import re
from collections import OrderedDict
from typing import Any

import numpy as np
import torch

from fusedrec_torchrec.checkpoint.dtypes import DTYPES
from fusedrec_torchrec.checkpoint.inert_pickle import Call, Name, Pairs, read_pickle
from fusedrec_torchrec.checkpoint.torch_file import TENSOR_NAMES, TorchFile, tensor_in_file

__all__ = ["read_object"]

DEEPEST = 100  # containers in containers
MOST_SHARED = 10  # times that an object may stand for more than it has bytes in the file
LARGEST_NUMBER = 4096  # bits
BYTES = "_codecs.encode"
DEVICE = re.compile(r"[a-z]+(:\d{1,4})?")
PARAMETER = "torch._utils._rebuild_parameter"
ALLOWED = TENSOR_NAMES | {
    *(BYTES, PARAMETER, "torch.Size", "torch.device"),
    *(f"{module}.{name}" for module in ("__builtin__", "builtins") for name in ("set", "complex")),
}


def read_object(file: TorchFile) -> Any:
    """Returns the object in a file of ``torch.save``.

    Raises:
        ValueError: it is damaged, or not made of plain data.
    """
    content = file.pickle
    most = 1000 + MOST_SHARED * len(content)
    return _Builder(file, most).build(read_pickle(content, ALLOWED), 0)


class _Builder:
    """Builds plain data of the description that ``read_pickle`` returns."""

    def __init__(self, file: TorchFile, most: int) -> None:
        self._file, self._most = file, most
        self._count = 0
        self._storages: dict[str, np.ndarray[Any, np.dtype[np.uint8]]] = {}

    def build(self, described: Any, depth: int) -> Any:
        self._count += 1
        if depth > DEEPEST or self._count > self._most:
            raise ValueError("it is nested too deeply, or has too many objects")
        kind = type(described)
        if kind in (type(None), bool, float, str, bytes):
            return described
        if kind is int:
            if described.bit_length() > LARGEST_NUMBER:
                raise ValueError(f"it has a number of {described.bit_length()} bits")
            return described
        if kind in (list, tuple):
            return kind(self.build(item, depth + 1) for item in described)
        if kind is Pairs:
            return self._dict(described, depth)
        if kind is Name and described.full in DTYPES:
            return DTYPES[described.full]
        if kind is Call and described.state is None:
            return self._call(described, depth)
        raise ValueError(f"it has a {kind.__name__}, which is no plain data")

    def _dict(self, pairs: Pairs, depth: int) -> dict[Any, Any]:
        return {self._key(key, depth + 1): self.build(value, depth + 1) for key, value in pairs}

    def _key(self, described: Any, depth: int) -> Any:
        """Returns a key of a dict or an element of a set, which must be quick to hash."""
        if type(described) is tuple:
            return tuple(self._key(item, depth + 1) for item in self._within(described, depth))
        if type(described) in (bool, int, float, str, bytes, type(None), Name):
            return self.build(described, depth)
        raise ValueError(f"it has a key that is a {type(described).__name__}")

    def _within(self, items: tuple[Any, ...], depth: int) -> tuple[Any, ...]:
        self._count += len(items)
        if depth > DEEPEST or self._count > self._most:
            raise ValueError("it is nested too deeply, or has too many objects")
        return items

    def _call(self, call: Call, depth: int) -> Any:
        name, arguments = call.name, call.arguments
        short = name.rpartition(".")[2]
        if name == PARAMETER and len(arguments) == 3:
            return torch.nn.Parameter(self._tensor(arguments[0]), bool(arguments[1] is True))
        if name == "collections.OrderedDict" and not arguments:
            return OrderedDict(self._dict(call.items or Pairs(), depth))
        if name.startswith("torch._utils."):
            return self._tensor(call)
        if call.items:
            raise ValueError(f"it puts items into {name}")
        if short == "set" and len(arguments) == 1 and type(arguments[0]) is list:
            return {self._key(item, depth + 1) for item in arguments[0]}
        plain = [self.build(argument, depth + 1) for argument in arguments]
        match short, plain:
            case "Size", [tuple() as sizes] if all(_is_size(size) for size in sizes):
                return torch.Size(sizes)
            case "device", [str() as kind, *index] if DEVICE.fullmatch(kind):
                if len(index) <= 1 and all(_is_size(number) for number in index):
                    return _device(kind, *index)
            case "complex", [float() as real, float() as imaginary]:
                return complex(real, imaginary)
            case "encode", [str() as text, "latin1"]:
                return text.encode("latin1")
        raise ValueError(f"it calls {name} in a way that no checkpoint needs")

    def _tensor(self, described: Any) -> torch.Tensor:
        tensor = tensor_in_file(described, self._file)
        if tensor.storage not in self._storages:
            size = self._file.place(tensor.storage)[1]
            content = self._file.read(tensor.storage, size)
            self._storages[tensor.storage] = np.frombuffer(bytearray(content), np.uint8)
        numbers = tensor.numbers(self._storages[tensor.storage])
        return torch.from_numpy(numbers).view(tensor.dtype)


def _device(kind: str, *index: int) -> torch.device:
    try:
        return torch.device(kind, *index)
    except RuntimeError as error:
        raise ValueError(str(error).partition("\n")[0]) from None


def _is_size(value: Any) -> bool:
    return type(value) is int and 0 <= value < 1 << 60
