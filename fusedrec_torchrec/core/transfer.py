"""Small lists of numbers to the device, without waiting for it."""

from collections.abc import Sequence

import torch

__all__ = ["to_device"]


def to_device(values: Sequence[int], device: torch.device) -> torch.Tensor:
    """An int64 tensor; on CUDA it goes through pinned memory, so that the copy is asynchronous."""
    if device.type == "cuda":
        return torch.tensor(values, dtype=torch.int64, pin_memory=True).to(
            device, non_blocking=True
        )
    return torch.tensor(values, dtype=torch.int64, device=device)
