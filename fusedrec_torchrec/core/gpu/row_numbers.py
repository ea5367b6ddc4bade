"""Ids to the distinct rows that they ask for, on CUDA: what ``row_numbers.h`` does on CPU.

Ids find their places in a hash table, those with the same key the same one; occupied places are
numbered part by part; and every id takes the number of its place.  Which of two keys of a part
comes first is left to chance, so whoever wants the same sums in every run sorts instead
(``exchange/dedup.py``).

Nothing comes to the host: ``keys_U`` is as long as there are ids, and what is behind the unique
ones means nothing, or, if there are hot rows, is the size of the key space.

Shape suffixes: N ids, S slots, W ranks, P parts, K buckets, B bags, H places of the hash table.
"""

from collections.abc import Sequence
from itertools import accumulate

import torch
import triton
import triton.language as tl

from fusedrec_torchrec.core.transfer import to_device

__all__ = ["number_rows"]

BLOCK = 256
INSERTED = 128  # ids of a program that inserts: with more, registers are spilled
MOST_PARTS = 32  # whose keys are numbered by sums over a block, not by one atomic for each key


@triton.jit
def _slot_of(at, ends, slots, STEPS: tl.constexpr):
    """Returns in which range each position is, by bisection: how many ranges end before it."""
    slot = at * 0
    for step in tl.static_range(STEPS):
        tried = slot + (1 << (STEPS - 1 - step))
        is_inside = tried < slots
        end = tl.load(ends + tried - 1, mask=is_inside, other=0)
        slot = tl.where(is_inside & (end <= at), tried, slot)
    return slot


@triton.jit
def _home(key, shift):
    """Returns the place where the search for a key begins, as the C++ operators have it."""
    product = key.to(tl.uint64) * 0x9E3779B97F4A7C15
    return (product >> shift.to(tl.uint64)).to(tl.int64)


@triton.jit
def _replica_of(key, hot_table, hot_shift, hot_mask, live):
    """Returns the keys of the replicas of hot rows, and all other keys as they are."""
    place = _home(key, hot_shift)
    is_open = live
    while tl.max(is_open.to(tl.int32), 0) > 0:
        held = tl.load(hot_table + 2 * place, mask=is_open, other=-1)
        is_hot = is_open & (held == key)
        key = tl.load(hot_table + 2 * place + 1, mask=is_hot, other=0) * is_hot + key * (~is_hot)
        is_open = is_open & (held != -1) & (~is_hot)
        place = (place + 1) & hot_mask
    return key


@triton.jit
def _insert(
    ids, slot_ends, rows, starts, shifts, hot_table, table, place_of_id, bad,
    n, slots, ranks, shift, mask, hot_shift, hot_mask,
    HOT: tl.constexpr, STEPS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Turns ids into keys, and has each find its place in the table; who comes first takes it.

    The table holds keys plus one, so that it is empty if all is zero.
    """
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    live = at < n
    id_ = tl.load(ids + at, mask=live, other=0).to(tl.int64)
    slot = _slot_of(at, slot_ends, slots, STEPS)
    limit = tl.load(rows + slot, mask=live, other=1)
    is_bad = live & ((id_ < 0) | (id_ >= limit))
    id_ = tl.where(is_bad, 0, id_)
    owner = slot * 0
    for rank in range(1, ranks):
        owner += (id_ >= tl.load(starts + slot * ranks + rank, mask=live, other=0)).to(tl.int64)
    key = id_ + tl.load(shifts + slot * ranks + owner, mask=live, other=0)
    if HOT:
        key = _replica_of(key, hot_table, hot_shift, hot_mask, live)
    place = _home(key, shift)
    wanted = (key + 1).to(table.dtype.element_ty)
    is_open = live
    while tl.max(is_open.to(tl.int32), 0) > 0:
        # Those that are done compare with what is never there, and change nothing.
        before = tl.atomic_cas(table + place, tl.where(is_open, 0, -1).to(wanted.dtype), wanted)
        is_open = is_open & (before != 0) & (before != wanted)
        place = tl.where(is_open, (place + 1) & mask, place)
    tl.store(place_of_id + at, place.to(tl.int32), mask=live)
    tl.store(bad + at * 0, (at * 0 + 1).to(tl.uint8), mask=is_bad)


@triton.jit
def _part_of(key, part_starts, parts):
    part = (key * 0).to(tl.int32)
    for p in range(1, parts):
        part += (key >= tl.load(part_starts + p)).to(tl.int32)
    return part


@triton.jit
def _number(
    table, part_starts, number_of_place, counts, size, parts,
    BY_BLOCK: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Numbers the keys of each part."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    key = tl.load(table + at, mask=at < size, other=0) - 1
    used = key >= 0
    part = _part_of(key, part_starts, parts)
    if BY_BLOCK:
        number = part * 0
        for p in range(parts):
            own = (used & (part == p)).to(tl.int32)
            total = tl.sum(own, 0)
            if total > 0:
                first = tl.atomic_add(counts + p, total.to(tl.int64)).to(tl.int32)
                number += own * (first + tl.cumsum(own, 0) - own)
    else:
        number = tl.atomic_add(counts + part, used.to(tl.int64), mask=used).to(tl.int32)
    tl.store(number_of_place + at, number, mask=used)


@triton.jit
def _place(
    table, part_starts, number_of_place, counts, keys, size, owners, parts,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Brings the keys together, part after part; numbers become those within the bucket."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    key = tl.load(table + at, mask=at < size, other=0) - 1
    used = key >= 0
    part = _part_of(key, part_starts, parts)
    before, before_bucket = (part * 0).to(tl.int64), (part * 0).to(tl.int64)
    for p in range(parts):
        count = tl.load(counts + p)
        before += tl.where(part > p, count, 0)
        before_bucket += tl.where(part // owners * owners > p, count, 0)
    row = before + tl.load(number_of_place + at, mask=used, other=0)
    tl.store(keys + row, key, mask=used)
    tl.store(number_of_place + at, (row - before_bucket).to(tl.int32), mask=used)


@triton.jit
def _rows_of_ids(place_of_id, number_of_place, rows, n, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    place = tl.load(place_of_id + at, mask=at < n, other=0)
    tl.store(rows + at, tl.load(number_of_place + place, mask=at < n, other=0), mask=at < n)


@triton.jit
def _rows_of_bags(
    place_of_id, number_of_place, from_B1, to_B1, rows,
    bags, batch, slots, first_bag, first_id, ids, BLOCK: tl.constexpr,
):  # fmt: skip
    """The same, for the bags of one bucket, which come slot after slot and go sample after sample.

    Args:
        from_B1: where the bags of all slots begin.
        to_B1: where those of the bucket begin, in the order (sample, slot).
        first_bag, first_id: of the bucket.
        ids: of all slots.
    """
    bag = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    live = bag < bags
    begin = tl.load(from_B1 + first_bag + bag, mask=live, other=0)
    length = tl.load(from_B1 + first_bag + bag + 1, mask=live, other=0) - begin
    to = tl.load(to_B1 + bag % batch * slots + bag // batch, mask=live, other=0)
    for i in range(tl.max(length, 0)):
        # Lengths that are wrong are told by the status word; until then, nothing is overrun.
        is_id = live & (i < length) & (begin + i >= 0) & (first_id + to + i >= 0)
        is_id = is_id & (begin + i < ids) & (first_id + to + i < ids)
        place = tl.load(place_of_id + begin + i, mask=is_id, other=0)
        row = tl.load(number_of_place + place, mask=is_id, other=0)
        tl.store(rows + first_id + to + i, row, mask=is_id)


def number_rows(
    ids_N: torch.Tensor,
    lengths_B: torch.Tensor,
    counts: Sequence[int],
    rows_S: torch.Tensor,
    starts_SW: torch.Tensor,
    shifts_SW: torch.Tensor,
    part_starts_P1: torch.Tensor,
    hot_table: torch.Tensor | None,
    slot_ends: Sequence[int],
    batch: int,
) -> tuple[torch.Tensor, torch.Tensor, list[torch.Tensor], torch.Tensor, torch.Tensor]:
    """Numbers the distinct rows that the ids of a batch ask for; see ``row_numbers.h``.

    Offsets of bags have elements also if every bag has one id: only the device knows.
    """
    device, ids, slots = ids_N.device, ids_N.numel(), rows_S.numel()
    parts, key_dtype = part_starts_P1.numel() - 1, part_starts_P1.dtype
    bits = max((2 * ids - 1).bit_length(), 6)
    size = 1 << bits
    bags = [(b - a) * batch for a, b in zip([0, *slot_ends[:-1]], slot_ends, strict=True)]
    counts_P, flag, table_H, from_B1, *offsets = _zeros(
        device,
        (parts, torch.int64),
        (8, torch.uint8),
        (size, key_dtype),
        *((n + 1, torch.int32) for n in (sum(bags), *bags)),
    )
    bad = flag[:1].view(torch.bool)[0]
    number_H = torch.empty(size, dtype=torch.int32, device=device)
    place_N = torch.empty(ids, dtype=torch.int32, device=device)
    rows_N = torch.empty(ids, dtype=torch.int32, device=device)
    keys_U = torch.empty(ids, dtype=key_dtype, device=device)
    if hot_table is not None:  # whoever counts keys must tell them from the others
        keys_U.copy_(part_starts_P1[-1:].expand(ids))
    ends_S = to_device(list(accumulate(counts)), device)
    if ids:
        hot_size = 2 if hot_table is None else hot_table.size(0)
        _insert[(triton.cdiv(ids, INSERTED),)](
            ids_N, ends_S, rows_S, starts_SW, shifts_SW,
            table_H if hot_table is None else hot_table,
            table_H, place_N, flag, ids, slots, starts_SW.size(1),
            64 - bits, size - 1, 65 - hot_size.bit_length(), hot_size - 1,
            HOT=hot_table is not None,
            STEPS=max((slots - 1).bit_length(), 1), BLOCK=INSERTED,
        )  # fmt: skip
        places = (triton.cdiv(size, BLOCK),)
        _number[places](
            table_H, part_starts_P1, number_H, counts_P, size, parts,
            BY_BLOCK=parts <= MOST_PARTS, BLOCK=BLOCK,
        )  # fmt: skip
        _place[places](
            table_H, part_starts_P1, number_H, counts_P, keys_U, size,
            parts // len(slot_ends), parts, BLOCK=BLOCK,
        )  # fmt: skip
    if not batch:
        if ids:
            _rows_of_ids[(triton.cdiv(ids, BLOCK),)](place_N, number_H, rows_N, ids, BLOCK=BLOCK)
        return keys_U, rows_N, [], counts_P, bad
    torch.cumsum(lengths_B, 0, dtype=torch.int32, out=from_B1[1:])
    first_slot = 0
    for end_slot, to_B1 in zip(slot_ends, offsets, strict=True):
        own = end_slot - first_slot
        lengths = lengths_B[first_slot * batch : end_slot * batch].view(own, batch).t()
        torch.cumsum(lengths.reshape(-1), 0, dtype=torch.int32, out=to_B1[1:])
        if own:
            _rows_of_bags[(triton.cdiv(own * batch, BLOCK),)](
                place_N, number_H, from_B1, to_B1, rows_N,
                own * batch, batch, own, first_slot * batch, sum(counts[:first_slot]), ids,
                BLOCK=BLOCK,
            )  # fmt: skip
        first_slot = end_slot
    return keys_U, rows_N, offsets, counts_P, bad


def _zeros(device: torch.device, *tensors: tuple[int, torch.dtype]) -> list[torch.Tensor]:
    """Returns tensors of zeros, of these sizes and types, by one kernel."""
    words = [-(-size * dtype.itemsize // 16) * 2 for size, dtype in tensors]  # aligned to 16 bytes
    pieces = torch.zeros(sum(words), dtype=torch.int64, device=device).split(words)
    return [piece.view(dtype)[:size] for piece, (size, dtype) in zip(pieces, tensors, strict=True)]
