"""Whether lengths are what the host takes them for, on CUDA; on CPU the host looks itself."""

from collections.abc import Sequence
from itertools import accumulate

import torch
import triton
import triton.language as tl

from fusedrec_torchrec.core.gpu.kernel import kernel
from fusedrec_torchrec.core.transfer import to_device

__all__ = ["bad_lengths"]

BLOCK = 1024


@kernel(numbers="bags ids", addresses="lengths offsets ends counts")
def _bad_lengths(
    lengths, offsets, ends, counts, bad, bags, ids, slots,
    COUNTED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Looks at some bags; and the first program, at whole slots."""
    bag = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    live = bag < bags
    length = tl.load(lengths + bag, mask=live, other=0)
    begin = tl.load(offsets + bag, mask=live, other=0)
    end = tl.load(offsets + bag + 1, mask=live, other=0)
    is_bad = tl.max(((length < 0) | (begin < 0) | (end - begin != length)).to(tl.int32), 0)
    if tl.program_id(0) == 0:
        is_bad |= (tl.load(offsets + bags) != ids).to(tl.int32)
        is_bad |= (tl.load(offsets) != 0).to(tl.int32)
        if COUNTED:
            for first in range(0, slots, BLOCK):
                slot = first + tl.arange(0, BLOCK)
                is_slot = slot < slots
                from_ = tl.load(ends + slot, mask=is_slot, other=0)
                to = tl.load(ends + slot + 1, mask=is_slot, other=0)
                count = tl.load(offsets + to, mask=is_slot, other=0).to(tl.int64)
                count -= tl.load(offsets + from_, mask=is_slot, other=0)
                claimed = tl.load(counts + slot, mask=is_slot, other=0)
                is_bad |= tl.max((count != claimed).to(tl.int32), 0)
    if is_bad > 0:
        tl.store(bad, (is_bad * 0 + 1).to(tl.uint8))


def bad_lengths(
    lengths_B: torch.Tensor,
    offsets_B1: torch.Tensor,
    ids: int,
    strides: Sequence[int],
    counts: Sequence[int],
) -> torch.Tensor:
    """Returns whether lengths are negative, do not fit the offsets, or do not add up.

    Args:
        lengths_B: ids of each bag, slot after slot.
        offsets_B1: where bags begin.
        ids: of all bags.
        strides: bags of each slot.
        counts: ids of each slot, as the host has it; none if it has not.
    """
    device, slots = lengths_B.device, len(strides)
    bad = torch.zeros(1, dtype=torch.uint8, device=device)
    if lengths_B.numel():
        numbers = to_device([0, *accumulate(strides), *counts], device) if counts else offsets_B1
        _bad_lengths[(triton.cdiv(lengths_B.numel(), BLOCK),)](
            lengths_B, offsets_B1, numbers, numbers[slots + 1 :] if counts else numbers, bad,
            lengths_B.numel(), ids, slots, COUNTED=bool(counts), BLOCK=BLOCK,
        )  # fmt: skip
    return bad.view(torch.bool)[0]
