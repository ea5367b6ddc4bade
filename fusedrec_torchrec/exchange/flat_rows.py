"""Where received rows lie in the buffer that came over the wire."""

from collections.abc import Callable, Sequence
from itertools import accumulate

import torch

__all__ = ["FlatRows", "TakeScale"]

TakeScale = Callable[[], float]
"""Gives what gradients of rows are to be multiplied with, a power of two, and leaves it to us."""


class FlatRows:
    """Where the rows of each bucket lie in the flat buffer.

    Attributes:
        dims: columns of each bucket's rows.
        rows: how many each bucket has.
        elements: of all of them.
        addresses: where the rows of each bucket begin; None if they lie one after another.
        of_all: the same for the rows of all buckets, on CUDA.
    """

    def __init__(self, counts: list[list[int]], dims: Sequence[int], device: torch.device) -> None:
        self.dims = list(dims)
        self.rows = [sum(row[k] for row in counts) for k in range(len(dims))]
        self.elements = sum(n * dim for n, dim in zip(self.rows, dims, strict=True))
        self.of_all: torch.Tensor | None = None
        self.addresses: list[torch.Tensor | None] = [None] * len(dims)
        if len(dims) == 1:
            return  # one after another
        if device.type == "cuda":
            flat = [count for row in counts for count in row]
            like = torch.empty(0, device=device)
            self.of_all = torch.ops.fusedrec.row_addresses(like, flat, self.dims)
            self.addresses = list(self.of_all.split(self.rows))
            return
        sizes = [n * dim for row in counts for n, dim in zip(row, dims, strict=True)]
        starts = torch.tensor([0, *accumulate(sizes)][:-1]).view(len(counts), len(dims))
        counts_WK = torch.tensor(counts)
        for k, dim in enumerate(dims):
            counts_W = counts_WK[:, k]
            first_W = starts[:, k] - (counts_W.cumsum(0) - counts_W) * dim
            self.addresses[k] = torch.arange(self.rows[k]).mul_(dim) + first_W.repeat_interleave(
                counts_W, output_size=self.rows[k]
            )
