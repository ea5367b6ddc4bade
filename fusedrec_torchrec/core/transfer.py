"""Brings small lists of numbers to a device, without waiting for it."""

from collections.abc import Sequence

import torch

__all__ = ["to_device"]


def to_device(values: Sequence[int], device: torch.device) -> torch.Tensor:
    """Returns an int64 tensor on the device; on CUDA it is copied asynchronously."""
    if device.type == "cuda":
        return torch.tensor(values, dtype=torch.int64, pin_memory=True).to(
            device, non_blocking=True
        )
    return torch.tensor(values, dtype=torch.int64, device=device)
