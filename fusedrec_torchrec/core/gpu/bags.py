"""Equal bags, and what is asked of owners that pool them, on CUDA: ``bags.h`` on CPU.

Bags find their places in a hash table, equal ones the same one; whoever finds a place taken
compares ids and weights in full.  The first bag of every place is the distinct one.  What owners
are asked for is counted, and written, from one running sum over the *cells*: bags times shards of
their table, in the order (bucket, owner).  A cell whose bag is a distinct one is a unit.

Nothing comes to the host.  All slots look for equal bags, always: that takes one pass over the ids,
and the same bags are one in every run.

Shape suffixes: S slots, X shards of the slots' tables, B bags, N ids, C cells, K buckets, W ranks,
P = K * W parts, H places of the hash table.
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from fusedrec_torchrec.core.gpu.kernel import kernel
from fusedrec_torchrec.core.gpu.row_numbers import _slot_of
from fusedrec_torchrec.core.gpu.starts import starts_on_device

__all__ = ["ask_bags", "pack_units"]

BLOCK = 128
ELEMENTS = 256  # ids that a program has in hand
PACKED = 128  # when it writes what owners are asked for: with more, registers are spilled
MOST_IDS = 16  # of a bag at a time


@triton.jit
def _bag(starts, refused, at, live, n):
    """Returns where a bag begins and its length; if lengths are wrong, nothing is overrun.

    If they are known to be, bags have no ids.
    """
    if refused is not None:
        live = live & (tl.load(refused).to(tl.int32) == 0)
    begin = tl.load(starts + at, mask=live, other=0)
    begin = tl.minimum(tl.maximum(begin, 0), n)
    end = tl.minimum(tl.load(starts + at + 1, mask=live, other=0), n)
    return begin, tl.maximum(end - begin, 0)


@triton.jit
def _first_of(ends, slot, live):
    """Returns where the range of a slot begins."""
    return tl.load(ends + slot - 1, mask=live & (slot > 0), other=0)


@kernel(numbers="bags n", addresses="ids weights starts refused bad")
def _hash_bags(
    ids, weights, starts, refused, bag_ends, tables, rows, hashes, table_of_bag, bad,
    bags, n, slots,
    WEIGHTED: tl.constexpr, STEPS: tl.constexpr, IDS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Hashes bags as ``bags.h`` does, by sums of products, and looks whether ids are in range."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    live = at < bags
    slot = _slot_of(at, bag_ends, 1, slots, STEPS)
    table = tl.load(tables + slot, mask=live, other=0)
    limit = tl.load(rows + slot, mask=live, other=1)
    begin, length = _bag(starts, refused, at, live, n)
    total = table * -2997003823098823277 + length
    outside = (at * 0).to(tl.int32)
    for first in range(0, tl.max(length, 0), IDS):
        i = first + tl.arange(0, IDS)
        is_id = i[None, :] < length[:, None]
        at_id = begin[:, None] + i[None, :]
        id_ = tl.load(ids + at_id, mask=is_id, other=0).to(tl.int64)
        # Steps are even, so that factors stay odd.
        factor = i.to(tl.int64) * -4417276706812531890 - 7046029254386353131
        product = (id_ + 7145170384384614425) * factor[None, :]
        if WEIGHTED:
            bits = tl.load(weights + at_id, mask=is_id, other=0).to(tl.int64)
            product += (bits + 7145170384384614425) * (factor[None, :] ^ 6364136223846793004)
        total += tl.sum(tl.where(is_id, product, 0), 1)
        is_bad = is_id & ((id_ < 0) | (id_ >= limit[:, None]))
        outside = outside | tl.max(is_bad.to(tl.int32), 1)
    total = (total ^ (total >> 32)) * -7046029254386353131
    tl.store(hashes + at, total ^ (total >> 29), mask=live)
    tl.store(table_of_bag + at, table.to(tl.int32), mask=live)
    tl.store(bad + at * 0, (at * 0 + 1).to(tl.uint8), mask=live & (outside > 0))


@kernel(numbers="bags n shift mask", addresses="ids weights starts refused place_of_bag")
def _insert_bags(
    ids, weights, starts, refused, hashes, table_of_bag, held_by, first_of, place_of_bag,
    bags, n, shift, mask, WEIGHTED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Has every bag with ids find its place, and tells the place which bags are there.

    Places hold numbers of bags plus one, and the number of bags minus that of their first one, so
    that they are empty if all is zero.  Bags and places are counted in 32 bits: with 64 registers
    would be spilled.
    """
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    live = at < bags
    begin, length = _bag(starts, refused, at, live, n)
    own_hash = tl.load(hashes + at, mask=live, other=0)
    own_table = tl.load(table_of_bag + at, mask=live, other=0)
    place = (own_hash.to(tl.uint64) >> shift.to(tl.uint64)).to(tl.int32)
    has_ids = live & (length > 0)
    is_open = has_ids
    while tl.max(is_open.to(tl.int32), 0) > 0:
        held = tl.load(held_by + place, mask=is_open, other=1)
        is_empty = is_open & (held == 0)
        if tl.max(is_empty.to(tl.int32), 0) > 0:
            # All take part: who wants nothing changes zero to zero, at a place of its own.
            target = tl.where(is_empty, place, tl.where(live, at, 0))
            new = tl.where(is_empty, at + 1, 0)
            before = tl.atomic_cas(held_by + target, tl.zeros_like(new), new)
            held = tl.where(is_empty, before, held)
        is_held = is_open & (held != 0)
        other = tl.where(is_held, held - 1, 0)
        other_begin, other_length = _bag(starts, refused, other, is_held, n)
        is_same = is_held & (tl.load(hashes + other, mask=is_held, other=0) == own_hash)
        is_same = is_same & (tl.load(table_of_bag + other, mask=is_held, other=0) == own_table)
        is_same = is_same & (other_length == length)
        # Equal hashes are compared in full.
        differs = at < 0
        for i in range(tl.max(tl.where(is_same, length, 0), 0)):
            is_id = is_same & (i < length)
            own = tl.load(ids + begin + i, mask=is_id, other=0)
            differs = differs | (own != tl.load(ids + other_begin + i, mask=is_id, other=0))
            if WEIGHTED:
                bits = tl.load(weights + begin + i, mask=is_id, other=0)
                others = tl.load(weights + other_begin + i, mask=is_id, other=0)
                differs = differs | (bits != others)
        is_open = is_held & ((~is_same) | differs)
        place = tl.where(is_open, (place + 1) & mask, place)
    tl.atomic_max(first_of + place, bags - at, mask=has_ids)
    tl.store(place_of_bag + at, place, mask=has_ids)


@kernel(numbers="bags n", addresses="starts refused place_of_bag")
def _mark_units(
    starts, refused, bag_ends, ends, runs, first_of, place_of_bag, sums, bags, n, slots,
    STEPS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Writes for each cell whether it is a unit, in the upper half, and its ids, in the lower."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    live = at < bags
    slot = _slot_of(at, bag_ends, 1, slots, STEPS)
    _, length = _bag(starts, refused, at, live, n)
    has_ids = live & (length > 0)
    place = tl.load(place_of_bag + at, mask=has_ids, other=0)
    first = bags - tl.load(first_of + place, mask=has_ids, other=0)
    is_first = has_ids & (first == at)
    unit = tl.where(is_first, length.to(tl.int64) + 4294967296, 0)
    bag = at - _first_of(bag_ends, slot, live)
    shard = _first_of(ends, slot, live)
    shards = tl.load(ends + slot, mask=live, other=0) - shard
    for c in range(tl.max(shards, 0)):
        has_shard = live & (c < shards)
        cell = tl.load(runs + shard + c, mask=has_shard, other=0) + bag
        tl.store(sums + 1 + cell, unit, mask=has_shard)


@kernel(numbers="bags n", addresses="starts refused place_of_bag")
def _cells(
    starts, refused, bag_ends, ends, means, shard_buckets, runs, out_firsts, out_steps, part_cells,
    first_of, place_of_bag, sums, cells, divisor, counts, bags, n, slots, ranks, parts,
    MEAN: tl.constexpr, STEPS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Writes the unit of each cell, in the order of the output; and units and ids of each part."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    is_part = at < parts
    begin = tl.load(sums + tl.load(part_cells + at, mask=is_part, other=0), mask=is_part, other=0)
    end = tl.load(part_cells + at + 1, mask=is_part, other=0)
    end = tl.load(sums + end, mask=is_part, other=0)
    tl.store(counts + at, (end >> 32) - (begin >> 32), mask=is_part)
    ids = (end & 4294967295) - (begin & 4294967295)
    tl.store(counts + parts + at, ids, mask=is_part)

    live = at < bags
    slot = _slot_of(at, bag_ends, 1, slots, STEPS)
    _, length = _bag(starts, refused, at, live, n)
    has_ids = live & (length > 0)
    place = tl.load(place_of_bag + at, mask=has_ids, other=0)
    first = bags - tl.load(first_of + place, mask=has_ids, other=0).to(tl.int64)
    first_slot = _slot_of(first, bag_ends, 1, slots, STEPS)
    first_shard = _first_of(ends, first_slot, has_ids)
    first -= _first_of(bag_ends, first_slot, has_ids)
    bag = at - _first_of(bag_ends, slot, live)
    shard = _first_of(ends, slot, live)
    shards = tl.load(ends + slot, mask=live, other=0) - shard
    if MEAN:
        is_mean = live & tl.load(means + slot, mask=live, other=0).to(tl.int1)
        divided_by = tl.where(is_mean, tl.maximum(length, 1), 1).to(tl.float32)
    for c in range(tl.max(shards, 0)):
        has_shard = live & (c < shards)
        part = tl.load(shard_buckets + shard + c, mask=has_shard, other=0) * ranks
        begin = tl.load(part_cells + part, mask=has_shard, other=0)
        cell = tl.load(part_cells + part + ranks, mask=has_shard, other=0)  # an empty bag: the end
        own = tl.load(runs + first_shard + c, mask=has_shard & has_ids, other=0) + first
        cell = tl.where(has_ids, own, cell)
        unit = tl.load(sums + cell, mask=has_shard, other=0) >> 32
        unit -= tl.load(sums + begin, mask=has_shard, other=0) >> 32
        to = tl.load(out_firsts + shard + c, mask=has_shard, other=0)
        to += tl.load(out_steps + shard + c, mask=has_shard, other=0) * bag
        tl.store(cells + to, unit.to(tl.int32), mask=has_shard)
        if MEAN:
            tl.store(divisor + to, divided_by, mask=has_shard)


@kernel(numbers="bags n size", addresses="ids weights starts refused")
def _pack_units(
    ids, weights, starts, refused, bag_ends, ends, shard_buckets, shard_owners, first_rows, runs,
    part_cells, sums, counts, row_counts, word_starts, words,
    bags, n, slots, buckets, ranks, row_buckets, row_width, size,
    WEIGHTED: tl.constexpr, STEPS: tl.constexpr, IDS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Writes lengths, rows and weights of units to where the words for their owner are.

    What does not fit runs over the words of the next owner, and nothing behind the last one.
    """
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    live = at < bags
    slot = _slot_of(at, bag_ends, 1, slots, STEPS)
    begin, length = _bag(starts, refused, at, live, n)
    bag = at - _first_of(bag_ends, slot, live)
    shard = _first_of(ends, slot, live)
    shards = tl.load(ends + slot, mask=live, other=0) - shard
    for c in range(tl.max(shards, 0)):
        has_shard = live & (c < shards)
        cell = tl.load(runs + shard + c, mask=has_shard, other=0) + bag
        before = tl.load(sums + cell, mask=has_shard, other=0)
        is_unit = has_shard & (tl.load(sums + cell + 1, mask=has_shard, other=0) > before)
        bucket = tl.load(shard_buckets + shard + c, mask=is_unit, other=0)
        owner = tl.load(shard_owners + shard + c, mask=is_unit, other=0)
        zero = tl.load(part_cells + bucket * ranks + owner, mask=is_unit, other=0)
        zero = tl.load(sums + zero, mask=is_unit, other=0)
        to = tl.load(word_starts + owner, mask=is_unit, other=0)
        for k in range(row_buckets):
            to += tl.load(row_counts + k * row_width + owner, mask=is_unit, other=0)
        for k in range(buckets):
            is_before = is_unit & (k < bucket)
            to += tl.load(counts + k * ranks + owner, mask=is_before, other=0)
            in_bucket = tl.load(counts + (buckets + k) * ranks + owner, mask=is_before, other=0)
            to += in_bucket
            if WEIGHTED:
                to += in_bucket
        to_length = to + (before >> 32) - (zero >> 32)
        is_inside = is_unit & (to_length >= 0) & (to_length < size)
        tl.store(words + to_length, length.to(tl.int32), mask=is_inside)
        to += tl.load(counts + bucket * ranks + owner, mask=is_unit, other=0)
        to += (before & 4294967295) - (zero & 4294967295)
        in_part = tl.load(counts + (buckets + bucket) * ranks + owner, mask=is_unit, other=0)
        row = tl.load(first_rows + shard + c, mask=is_unit, other=0)
        for first in range(0, tl.max(tl.where(is_unit, length, 0), 0), IDS):
            i = first + tl.arange(0, IDS)
            at_id = begin[:, None] + i[None, :]
            to_id = to[:, None] + i[None, :]
            is_id = is_unit[:, None] & (i[None, :] < length[:, None]) & (to_id >= 0)
            id_ = tl.load(ids + at_id, mask=is_id, other=0) + row[:, None]
            tl.store(words + to_id, id_.to(tl.int32), mask=is_id & (to_id < size))
            if WEIGHTED:
                bits = tl.load(weights + at_id, mask=is_id, other=0)
                to_id += in_part[:, None]
                tl.store(words + to_id, bits, mask=is_id & (to_id < size))


def ask_bags(
    ids_N: torch.Tensor,
    starts_B1: torch.Tensor,
    weights_N: torch.Tensor | None,
    places: torch.Tensor,
    cells: int,
    tables_S: torch.Tensor,
    rows_S: torch.Tensor,
    means_S: torch.Tensor | None,
    ends_S: torch.Tensor,
    shards_3X: torch.Tensor,
    buckets: int,
    ranks: int,
    refused: torch.Tensor | None = None,
) -> tuple[torch.Tensor, ...]:
    """Finds distinct bags, and what owners are asked for.

    Args:
        ids_N: int32 or int64 ids of a batch, as rows of their tables; maybe also of other slots.
        starts_B1: where the bags begin among them, one behind another, and where the last one
            ends, int32.  Whatever they are, nothing is overrun.
        weights_N: weights of the ids, float32; None if they have none.
        places: where bags of slots end; for each shard where its cells begin, and its first cell in
            the output and the step from cell to cell there; where the cells of parts begin.
        cells: how many there are.
        tables_S: a number for the table of each slot; equal bags of one table are the same.
        rows_S: of the slot's table.
        means_S: whether each slot is mean-pooled, uint8; None if none is.
        ends_S: where the shards of each slot end.
        shards_3X: bucket, owner and first row in the owner's bucket of each shard.
        buckets, ranks: how many there are.
        refused: whether lengths are known to be wrong: then no bag has ids.  Else every one could
            have all of them, and so many are not hashed in the time that other ranks wait.  None if
            nobody knows.

    Returns:
        Units of each bucket and rank, and below them their ids; the unit of each cell, numbered in
        its bucket, in the order of the output, where the number of units stands for an empty bag;
        what each cell is divided by, without elements if nothing is; the running sum of units, in
        the upper half, and their ids over the cells; and whether any id is outside of its table.
    """
    device, bags, slots = ids_N.device, starts_B1.numel() - 1, tables_S.numel()
    bag_ends_S, runs_X, firsts_X, steps_X, part_cells_P1 = _split(
        places, slots, shards_3X.size(1), buckets * ranks
    )
    bits = max((2 * bags - 1).bit_length(), 6)
    size = 1 << bits
    zeros = torch.zeros(size + cells + 2, dtype=torch.int64, device=device)
    held_H, first_H = zeros[:size].view(torch.int32).split(size)
    sums_C1, flag = zeros[size:].split([cells + 1, 1])
    flag = flag.view(torch.uint8)
    hash_B = torch.empty(bags, dtype=torch.int64, device=device)
    table_B, place_B = torch.empty(2, bags, dtype=torch.int32, device=device)
    cells_C = torch.empty(cells, dtype=torch.int32, device=device)
    divisor_C = torch.empty(0 if means_S is None else cells, dtype=torch.float32, device=device)
    counts_HW = torch.empty(2 * buckets, ranks, dtype=torch.int64, device=device)
    bits_N = None if weights_N is None else weights_N.view(torch.int32)
    steps = _steps(slots)
    blocks = (triton.cdiv(bags, BLOCK),)
    if bags:
        ids = _ids_at_a_time(ids_N.numel(), bags)
        _hash_bags[(triton.cdiv(bags, ELEMENTS // ids),)](
            ids_N, bits_N, starts_B1, refused, bag_ends_S, tables_S, rows_S, hash_B, table_B, flag,
            bags, ids_N.numel(), slots,
            WEIGHTED=bits_N is not None, STEPS=steps, IDS=ids, BLOCK=ELEMENTS // ids,
        )  # fmt: skip
        _insert_bags[blocks](
            ids_N, bits_N, starts_B1, refused, hash_B, table_B, held_H, first_H, place_B,
            bags, ids_N.numel(), 64 - bits, size - 1,
            WEIGHTED=bits_N is not None, BLOCK=BLOCK,
        )  # fmt: skip
        _mark_units[blocks](
            starts_B1, refused, bag_ends_S, ends_S, runs_X, first_H, place_B, sums_C1,
            bags, ids_N.numel(), slots, STEPS=steps, BLOCK=BLOCK,
        )  # fmt: skip
    sums_C1[1:].cumsum_(0)
    _cells[(triton.cdiv(max(bags, buckets * ranks), BLOCK),)](
        starts_B1, refused, bag_ends_S, ends_S, means_S, shards_3X, runs_X, firsts_X, steps_X,
        part_cells_P1, first_H, place_B, sums_C1, cells_C, divisor_C, counts_HW,
        bags, ids_N.numel(), slots, ranks, buckets * ranks,
        MEAN=means_S is not None, STEPS=steps, BLOCK=BLOCK,
    )  # fmt: skip
    bad = flag[:1].view(torch.bool)[0]
    return counts_HW, cells_C, divisor_C, sums_C1, bad


def pack_units(
    ids_N: torch.Tensor,
    weights_N: torch.Tensor | None,
    places: torch.Tensor,
    ends_S: torch.Tensor,
    shards_3X: torch.Tensor,
    starts_B1: torch.Tensor,
    sums_C1: torch.Tensor,
    counts_HW: torch.Tensor,
    row_counts_KO: torch.Tensor | None,
    starts_W: Sequence[int],
    words: torch.Tensor,
    refused: torch.Tensor | None = None,
) -> None:
    """Writes what is asked of owners, as ``pack_bags`` does; see ``exchange/bag_routing.py``.

    Args:
        ids_N, weights_N, places, ends_S, shards_3X, starts_B1: as for ``ask_bags``.
        sums_C1, counts_HW: what that has returned.
        row_counts_KO: rows of other tables, whose words come first; None if there are none.
        starts_W: where the words for each owner begin.
        words: int32.
        refused: as for ``ask_bags``.
    """
    bags, slots, (lines, ranks) = starts_B1.numel() - 1, ends_S.numel(), counts_HW.shape
    if not bags:
        return
    shards = shards_3X.size(1)
    bag_ends_S, runs_X, _, _, part_cells_P1 = _split(places, slots, shards, lines // 2 * ranks)
    rows = counts_HW[:0] if row_counts_KO is None else row_counts_KO
    ids = _ids_at_a_time(ids_N.numel(), bags)
    _pack_units[(triton.cdiv(bags, PACKED // ids),)](
        ids_N, None if weights_N is None else weights_N.view(torch.int32), starts_B1, refused,
        bag_ends_S, ends_S, shards_3X[0], shards_3X[1], shards_3X[2], runs_X, part_cells_P1,
        sums_C1, counts_HW, rows, starts_on_device(starts_W, words.device), words,
        bags, ids_N.numel(), slots, lines // 2, ranks, rows.size(0), rows.stride(0),
        words.numel(),
        WEIGHTED=weights_N is not None, STEPS=_steps(slots), IDS=ids, BLOCK=PACKED // ids,
    )  # fmt: skip


def _split(places: torch.Tensor, slots: int, shards: int, parts: int) -> tuple[torch.Tensor, ...]:
    return places.split([slots, shards, shards, shards, parts + 1])


def _steps(slots: int) -> int:
    return max((slots - 1).bit_length(), 1)


def _ids_at_a_time(ids: int, bags: int) -> int:
    """Returns a power of two: about as many ids as bags have on average."""
    return min(triton.next_power_of_2(max(ids // bags, 1)), MOST_IDS)
