"""Brings small lists of numbers to a device, without waiting for it, and from there."""

from collections.abc import Sequence

import torch

__all__ = ["to_device", "to_host"]


def to_device(values: Sequence[int], device: torch.device) -> torch.Tensor:
    """Returns an int64 tensor on the device; on CUDA it is copied asynchronously."""
    if device.type == "cuda":
        return torch.tensor(values, dtype=torch.int64, pin_memory=True).to(
            device, non_blocking=True
        )
    return torch.tensor(values, dtype=torch.int64, device=device)


def to_host(values: torch.Tensor) -> list[int]:
    """Returns the numbers of a tensor; on CUDA they come through pinned memory."""
    if values.is_cuda:
        pinned = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
        pinned.copy_(values, non_blocking=True)
        torch.cuda.current_stream(values.device).synchronize()
        values = pinned
    numbers: list[int] = values.tolist()
    return numbers
