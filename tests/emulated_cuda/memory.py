"""Memory of emulated devices as the CPU sees it: it is host memory."""

import ctypes
from typing import Any, TypeGuard

import torch

__all__ = ["cpu_copy", "cpu_view", "is_on_device"]


def is_on_device(value: Any) -> TypeGuard[torch.Tensor]:
    """Returns whether a value is a tensor on an emulated device."""
    return isinstance(value, torch.Tensor) and value.device.type == "cuda"


def cpu_view(tensor: torch.Tensor) -> torch.Tensor:
    """Returns a CPU tensor in the memory of a tensor on an emulated device."""
    storage = tensor.untyped_storage()
    if storage.nbytes() == 0 or storage.data_ptr() == 0:
        return torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype)
    memory: Any = (ctypes.c_uint8 * storage.nbytes()).from_address(storage.data_ptr())
    memory.owner = tensor  # must live as long as the view
    flat = torch.frombuffer(memory, dtype=torch.uint8)
    return torch.empty(0, dtype=tensor.dtype).set_(
        flat.untyped_storage(), tensor.storage_offset(), tensor.size(), tensor.stride()
    )


def cpu_copy(value: Any) -> Any:
    """Returns an argument of an operator as the CPU should have it; tensors are copies."""
    if is_on_device(value):
        return cpu_view(value).clone()
    if isinstance(value, torch.Tensor) and value.device.type == "cpu":
        return value.clone()
    return torch.device("cpu") if isinstance(value, torch.device) else value
