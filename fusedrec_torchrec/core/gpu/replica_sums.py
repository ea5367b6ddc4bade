"""Gradients of the places of a replica, from all ranks, to one sum for each place, on CUDA.

FBGEMM would sort the places to bring equal ones together, in a dozen launches.  But a rank names a
place at most once, so that every place can note where each rank's gradient of it lies.  What is
noted is believed only if the rank has named the place there, so nothing has to be cleared before.
The first rank that names a place sums up the gradients of all, in the order of the ranks, the same
on all of them.

Shape suffixes: M places of all ranks, W ranks, D columns of a row.
"""

from collections.abc import Sequence
from itertools import accumulate

import torch
import triton
import triton.language as tl

from fusedrec_torchrec.core.gpu.kernel import kernel
from fusedrec_torchrec.core.transfer import to_device

__all__ = ["sum_replicas"]

BLOCK = 256
ELEMENTS = 512  # of the gradients that a program has in hand
MOST_PLACES = 16  # of a program that sums: with more, registers are spilled
FIELDS = 4  # of a rank: its first place and gradient, how many, and the first one of the result


@kernel(numbers="capacity", addresses="messages")
def _note_places(messages, pieces, noted, capacity, FIELDS: tl.constexpr, BLOCK: tl.constexpr):
    """Notes for each place of a rank, ``program_id(1)``, which of its gradients is the place's."""
    rank = tl.program_id(1)
    start = tl.load(pieces + FIELDS * rank)
    count = tl.load(pieces + FIELDS * rank + 2)
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    place = tl.load(messages + start + at, mask=at < count, other=0)
    line = rank.to(tl.int64) * capacity
    tl.store(noted + line + place, at.to(tl.int32), mask=at < count)


@kernel(numbers="capacity", addresses="messages rows")
def _sum_places(
    messages, rows, pieces, noted, places, sums, capacity, ranks, dim,
    FIELDS: tl.constexpr, BLOCK: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Sums up the gradients of some places of a rank, ``program_id(1)``, if it is the first one.

    Places that a rank before it has named become the one behind the last, with a sum of zero.
    """
    rank = tl.program_id(1)
    start = tl.load(pieces + FIELDS * rank)
    count = tl.load(pieces + FIELDS * rank + 2)
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    live = at < count
    place = tl.load(messages + start + at, mask=live, other=0).to(tl.int64)
    d = tl.arange(0, COLUMNS)
    is_first = live
    total = tl.zeros([BLOCK, COLUMNS], tl.float32)
    for other in range(ranks):
        first_place = tl.load(pieces + FIELDS * other)
        first_row = tl.load(pieces + FIELDS * other + 1)
        size = tl.load(pieces + FIELDS * other + 2)
        line = noted + tl.cast(other, tl.int64) * capacity
        where = tl.load(line + place, mask=is_first, other=-1).to(tl.int64)
        is_noted = is_first & (where >= 0) & (where < size)
        held = tl.load(messages + first_place + where, mask=is_noted, other=-1).to(tl.int64)
        is_named = is_noted & (held == place)
        is_first = is_first & ((other >= rank) | (~is_named))
        taken = is_named & is_first
        total += tl.load(
            rows + first_row + where[:, None] * dim + d[None, :],
            mask=taken[:, None] & (d[None, :] < dim), other=0.0,
        ).to(tl.float32)  # fmt: skip
    to = tl.load(pieces + FIELDS * rank + 3) + at
    tl.store(places + to, tl.where(is_first, place, capacity), mask=live)
    line = sums + to[:, None] * dim
    tl.store(line + d[None, :], total, mask=live[:, None] & (d[None, :] < dim))


def sum_replicas(
    messages: torch.Tensor,
    place_starts: Sequence[int],
    counts: Sequence[int],
    rows: torch.Tensor,
    row_starts: Sequence[int],
    dim: int,
    capacity: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Sums up gradients of places, in the order of the ranks.

    Args:
        messages: int32; holds the places of all ranks, of each rank each once.
        place_starts: where in it the places of each rank begin.
        counts: how many places each rank has.
        rows: holds their gradients, in the same order.
        row_starts: which of its elements is the first one of each rank.
        dim: columns of a gradient.
        capacity: places that there are.

    Returns:
        places, each once, but for those that no gradient is left for: they are ``capacity``, and
        their gradients zero; and their gradients, float32.
    """
    ranks, size = len(counts), sum(counts)
    places_M = torch.empty(size, dtype=torch.int64, device=messages.device)
    sums_MD = torch.empty(size, dim, device=messages.device)
    if not size:
        return places_M, sums_MD
    firsts = list(accumulate(counts, initial=0))[:-1]
    fields = zip(place_starts, row_starts, counts, firsts, strict=True)
    pieces = to_device([number for rank in fields for number in rank], messages.device)
    noted = torch.empty(ranks * capacity, dtype=torch.int32, device=messages.device)
    _note_places[(triton.cdiv(max(counts), BLOCK), ranks)](
        messages, pieces, noted, capacity, FIELDS=FIELDS, BLOCK=BLOCK
    )
    columns = triton.next_power_of_2(dim)
    block = max(min(ELEMENTS // columns, MOST_PLACES), 1)
    _sum_places[(triton.cdiv(max(counts), block), ranks)](
        messages, rows, pieces, noted, places_M, sums_MD, capacity, ranks, dim,
        FIELDS=FIELDS, BLOCK=block, COLUMNS=columns,
    )  # fmt: skip
    return places_M, sums_MD
