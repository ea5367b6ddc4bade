"""Whether lengths are what the host takes them for, on CUDA; on CPU the host looks itself."""

from collections.abc import Sequence
from itertools import accumulate

import torch
import triton
import triton.language as tl

from fusedrec_torchrec.core.transfer import to_device

__all__ = ["bad_lengths"]

BLOCK = 1024


@triton.jit
def _bad_lengths(lengths, ends, counts, bad, BLOCK: tl.constexpr):
    """Looks at the bags of one slot."""
    slot = tl.program_id(0)
    begin = tl.load(ends + slot)
    end = tl.load(ends + slot + 1)
    total = tl.zeros([BLOCK], tl.int64)
    least = tl.zeros([BLOCK], tl.int64)
    for first in range(begin, end, BLOCK):
        at = first + tl.arange(0, BLOCK)
        length = tl.load(lengths + at, mask=at < end, other=0).to(tl.int64)
        total += length
        least = tl.minimum(least, length)
    is_bad = (tl.min(least, 0) < 0) | (tl.sum(total, 0) != tl.load(counts + slot))
    if is_bad:
        tl.store(bad, (slot * 0 + 1).to(tl.uint8))


def bad_lengths(
    lengths_B: torch.Tensor, strides: Sequence[int], counts: Sequence[int]
) -> torch.Tensor:
    """Returns whether any length is negative, or those of a slot do not add up to its ids.

    Args:
        lengths_B: ids of each bag, slot after slot.
        strides: bags of each slot.
        counts: ids of each slot, as the host has it.
    """
    device, slots = lengths_B.device, len(strides)
    bad = torch.zeros(1, dtype=torch.uint8, device=device)
    if slots:
        numbers = to_device([0, *accumulate(strides), *counts], device)
        _bad_lengths[(slots,)](lengths_B, numbers, numbers[slots + 1 :], bad, BLOCK=BLOCK)
    return bad.view(torch.bool)[0]
