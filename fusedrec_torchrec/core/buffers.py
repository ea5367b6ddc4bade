"""Large tensors whose memory is used again by the next batch.

On CPU a fresh tensor of tens of megabytes comes from the operating system page by page, which can
cost more than filling it; CUDA's caching allocator has no such problem.  A buffer is lent out as
an ordinary tensor.  It comes back when the last reference to the tensor's storage is gone -
views, autograd and collectives included - so whoever keeps a tensor keeps its content.
"""

import weakref
from collections import defaultdict, deque
from math import prod

import numpy as np
import torch
from numpy.typing import NDArray

__all__ = ["Buffers"]

KEPT = 2  # of each name: the training pipelines have two batches in flight
ALIGNMENT = 64
ROOM = 1.125  # batches vary in size
SMALLEST = 1 << 16  # below it, malloc keeps memory itself


class Buffers:
    """Lends out buffers by name; each name keeps those of at most two batches."""

    def __init__(self) -> None:
        self._free: dict[str, deque[NDArray[np.uint8]]] = defaultdict(lambda: deque(maxlen=KEPT))

    def take(
        self, name: str, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        """Returns an uninitialised tensor, in memory that came back if there is some."""
        size = prod(shape) * dtype.itemsize
        if device.type != "cpu" or size < SMALLEST:
            return torch.empty(shape, dtype=dtype, device=device)
        block = self._fitting(name, size)
        lease = block[:size]
        weakref.finalize(lease, self._free[name].append, block).atexit = False
        # Not a view: autograd forbids writing into views that a function returns.
        storage = torch.from_numpy(lease).untyped_storage()
        return torch.empty(0, dtype=dtype).set_(storage, 0, shape)  # type: ignore[call-overload]

    def _fitting(self, name: str, size: int) -> NDArray[np.uint8]:
        """Returns a block that is large enough; smaller ones are let go."""
        free = self._free[name]
        while True:
            try:
                block = free.pop()  # the last to come back is most likely still in cache
            except IndexError:
                return _aligned(int(size * ROOM))
            if block.nbytes >= size:
                return block


def _aligned(size: int) -> NDArray[np.uint8]:
    raw = np.empty(size + ALIGNMENT, dtype=np.uint8)
    start = -raw.ctypes.data % ALIGNMENT
    return raw[start : start + size]
