"""A batch slot after slot, on CUDA, without a count of its ids on the host.

TorchRec's ``permute`` has to know how many ids its result has.  Here the result has as much room as
it may need, which the host knows; what is behind the last id means nothing.

Shape suffixes: N ids of the batch, M ids that there is room for, S slots, B bags of the slots.
"""

import torch
import triton
import triton.language as tl

from fusedrec_torchrec.core.gpu.kernel import kernel
from fusedrec_torchrec.core.gpu.row_numbers import _hashed, _slot_of
from fusedrec_torchrec.core.gpu.segments import check_ids

__all__ = ["hash_slots", "take_slots"]

BLOCK = 256
ELEMENTS = 512  # ids that a program has in hand
MOST_IDS = 16  # of a bag at a time


@triton.jit
def _source(at, offsets, refused, bag_ends, firsts, bags, n, slots, STEPS: tl.constexpr):
    """Returns where the bags of slots begin in the batch, and their lengths."""
    live = at < bags
    if refused is not None:
        live = live & (tl.load(refused).to(tl.int32) == 0)
    slot = _slot_of(at, bag_ends, 1, slots, STEPS)
    before = tl.load(bag_ends + slot - 1, mask=live & (slot > 0), other=0)
    source = tl.load(firsts + slot, mask=live, other=0) + at - before
    begin = tl.load(offsets + source, mask=live, other=0).to(tl.int64)
    begin = tl.minimum(tl.maximum(begin, 0), n)
    end = tl.minimum(tl.load(offsets + source + 1, mask=live, other=0).to(tl.int64), n)
    return begin, tl.maximum(end - begin, 0)


@kernel(numbers="bags n", addresses="offsets refused")
def _take_lengths(
    offsets, refused, bag_ends, firsts, lengths, bags, n, slots,
    STEPS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    _, length = _source(at, offsets, refused, bag_ends, firsts, bags, n, slots, STEPS)
    tl.store(lengths + at, length.to(tl.int32), mask=at < bags)


@kernel(numbers="bags n room", addresses="ids weights offsets refused")
def _take_ids(
    ids, weights, offsets, refused, bag_ends, firsts, starts, out, out_weights,
    bags, n, room, slots,
    WEIGHTED: tl.constexpr, STEPS: tl.constexpr, IDS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Copies the ids of some bags; if lengths are wrong, nothing is overrun."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    begin, length = _source(at, offsets, refused, bag_ends, firsts, bags, n, slots, STEPS)
    to = tl.load(starts + at, mask=at < bags, other=0).to(tl.int64)
    for first in range(0, tl.max(length, 0), IDS):
        i = first + tl.arange(0, IDS)
        at_id, to_id = begin[:, None] + i[None, :], to[:, None] + i[None, :]
        is_id = (i[None, :] < length[:, None]) & (to_id >= 0) & (to_id < room)
        tl.store(out + to_id, tl.load(ids + at_id, mask=is_id, other=0), mask=is_id)
        if WEIGHTED:
            weight = tl.load(weights + at_id, mask=is_id, other=0.0)
            tl.store(out_weights + to_id, weight, mask=is_id)


@kernel(numbers="n", addresses="ids slot_ends")
def _hash_slots(
    ids, slot_ends, rows, salts, out, n, slots, STEPS: tl.constexpr, BLOCK: tl.constexpr
):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    live = at < n
    id_ = tl.load(ids + at, mask=live, other=0).to(tl.int64)
    slot = _slot_of(at, slot_ends, 1, slots, STEPS)
    is_raw = tl.load(salts + 2 * slot, mask=live, other=0) != 0
    salt = tl.load(salts + 2 * slot + 1, mask=is_raw, other=0)
    limit = tl.load(rows + slot, mask=live, other=1)
    tl.store(out + at, tl.where(is_raw, _hashed(id_, salt, limit), id_), mask=live)


def take_slots(
    ids_N: torch.Tensor,
    weights_N: torch.Tensor | None,
    offsets: torch.Tensor,
    places_2S: torch.Tensor,
    bags: int,
    room: int,
    refused: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Brings together the bags of slots, each as often as it is asked for.

    Args:
        ids_N: ids of a batch.
        weights_N: of the ids; None if they have none.
        offsets: where the bags of the batch begin.
        places_2S: where the bags of each slot end among those of all slots; and the number of its
            first bag in the batch.
        bags: of all slots.
        room: for ids.  Those that find none are left out.
        refused: whether the offsets are known to be wrong: then no bag has ids.  Else every one
            could have all of them, and so many are not taken in the time that other ranks wait.
            None if nobody knows.

    Returns:
        ids and weights, as many as there is room for; lengths and offsets of the bags, int32.
        Without weights there are none.
    """
    check_ids(room)
    device, slots = ids_N.device, places_2S.size(1)
    out_M = torch.empty(room, dtype=ids_N.dtype, device=device)
    lengths_B = torch.empty(bags, dtype=torch.int32, device=device)
    offsets_B1 = torch.zeros(bags + 1, dtype=torch.int32, device=device)
    weights_M = torch.empty(0, device=device)
    if weights_N is not None:
        weights_M = torch.empty(room, dtype=weights_N.dtype, device=device)
    if not bags:
        return out_M, weights_M, lengths_B, offsets_B1
    n, steps = ids_N.numel(), max((slots - 1).bit_length(), 1)
    _take_lengths[(triton.cdiv(bags, BLOCK),)](
        offsets, refused, places_2S[0], places_2S[1], lengths_B, bags, n, slots,
        STEPS=steps, BLOCK=BLOCK,
    )  # fmt: skip
    torch.cumsum(lengths_B, 0, dtype=torch.int32, out=offsets_B1[1:])
    if room:
        at_a_time = min(triton.next_power_of_2(max(room // bags, 1)), MOST_IDS)
        block = ELEMENTS // at_a_time
        _take_ids[(triton.cdiv(bags, block),)](
            ids_N, weights_N, offsets, refused, places_2S[0], places_2S[1], offsets_B1,
            out_M, weights_M, bags, n, room, slots,
            WEIGHTED=weights_N is not None, STEPS=steps, IDS=at_a_time, BLOCK=block,
        )  # fmt: skip
    return out_M, weights_M, lengths_B, offsets_B1


def hash_slots(
    ids_N: torch.Tensor, ends_S: torch.Tensor, rows_S: torch.Tensor, salts_S2: torch.Tensor
) -> torch.Tensor:
    """Returns ids as rows of their tables, int64: raw values are hashed, others are left alone.

    Args:
        ids_N: slot after slot; others before and behind them become whatever.
        ends_S: where the ids of slots end.
        rows_S: of each slot's table.
        salts_S2: for each slot whether its ids are raw values, and their salt.
    """
    out_N = torch.empty(ids_N.numel(), dtype=torch.int64, device=ids_N.device)
    if ids_N.numel():
        slots = ends_S.numel()
        _hash_slots[(triton.cdiv(ids_N.numel(), BLOCK),)](
            ids_N, ends_S, rows_S, salts_S2, out_N, ids_N.numel(), slots,
            STEPS=max((slots - 1).bit_length(), 1), BLOCK=BLOCK,
        )  # fmt: skip
    return out_N
