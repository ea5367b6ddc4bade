"""Brings small lists of numbers to a device, without waiting for it, and from there.

What one stream has made and another one uses is told to the allocator here, too.
"""

from collections.abc import Sequence

import torch

__all__ = ["ToHost", "to_device", "to_host", "used_on_this_stream"]


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


def used_on_this_stream(*tensors: torch.Tensor | None) -> None:
    """Keeps memory from going back to the stream that it is of before this one is done with it."""
    for tensor in tensors:
        if tensor is not None and tensor.is_cuda:
            tensor.record_stream(torch.cuda.current_stream(tensor.device))


class ToHost:
    """Numbers on their way to the host, which looks at them later.

    Args:
        values: a tensor.
    """

    def __init__(self, values: torch.Tensor) -> None:
        self._event: torch.cuda.Event | None = None
        self._values = values
        if values.is_cuda:
            self._values = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
            self._values.copy_(values, non_blocking=True)
            self._event = torch.cuda.Event()
            self._event.record(torch.cuda.current_stream(values.device))

    def numbers(self) -> list[int]:
        """Returns the numbers; waits only if they have not come yet."""
        if self._event is not None and not self._event.query():
            self._event.synchronize()
        numbers: list[int] = self._values.tolist()
        return numbers
