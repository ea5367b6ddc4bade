"""Where kernels are tested: on a GPU, if there is a real one, else in Triton's interpreter.

Tests have their tensors on the host, and compare with torch and C++ there.  What a kernel is given
is copied to the GPU, in the same layout, and what it has written or returns comes back.
"""

import os
from collections.abc import Callable
from importlib import import_module
from types import FunctionType, ModuleType
from typing import Any

import torch
from torch.utils._pytree import tree_map

__all__ = ["DEVICE", "IS_INTERPRETED", "kernels_of"]

IS_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"  # see tests/conftest.py
DEVICE = torch.device("cpu" if IS_INTERPRETED else "cuda")


def kernels_of(name: str) -> Any:
    """Returns a module of ``core/gpu`` whose functions take and return tensors of the host."""
    module = import_module(f"fusedrec_torchrec.core.gpu.{name}")
    return module if IS_INTERPRETED else _OnDevice(module)


class _OnDevice:
    def __init__(self, module: ModuleType) -> None:
        self.__dict__["_module"] = module

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._module, name)
        return _moving(value) if isinstance(value, FunctionType) else value

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._module, name, value)


def _moving(function: Callable[..., Any]) -> Callable[..., Any]:
    def moving(*args: Any, **kwargs: Any) -> Any:
        copies: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

        def there(value: Any) -> Any:
            return _copied(value, copies) if isinstance(value, torch.Tensor) else value

        result = function(*tree_map(there, args), **tree_map(there, kwargs))
        for host, device in copies.values():
            host.copy_(device)
        return tree_map(lambda x: x.cpu() if isinstance(x, torch.Tensor) else x, result)

    return moving


def _copied(tensor: torch.Tensor, copies: dict[int, tuple[torch.Tensor, torch.Tensor]]) -> Any:
    """Returns the tensor on the device, in a copy of its memory that views of it share."""
    memory = tensor.untyped_storage()
    if not memory.nbytes():
        return tensor.to(DEVICE)
    if memory.data_ptr() not in copies:
        host = _nothing(torch.uint8, "cpu").set_(memory)
        copies[memory.data_ptr()] = host, host.to(DEVICE)
    device = copies[memory.data_ptr()][1].untyped_storage()
    own = _nothing(tensor.dtype, DEVICE)
    return own.set_(device, tensor.storage_offset(), tensor.size(), tensor.stride())


def _nothing(dtype: torch.dtype, device: Any) -> Any:
    return torch.tensor([], dtype=dtype, device=device)  # not empty(), which tests watch
