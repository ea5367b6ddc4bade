"""Ids to the distinct rows that they ask for, on CUDA: what ``row_numbers.h`` does on CPU.

Ids find their places in a hash table, those with the same key the same one; occupied places are
numbered part by part; and every id takes the number of its place.  Which of two keys of a part
comes first is left to chance, so whoever wants the same sums in every run sorts instead
(``exchange/dedup.py``).

Nothing comes to the host: ``keys_U`` is as long as there are ids, and what is behind the unique
ones means nothing, or, if there are hot rows, is the size of the key space.  Where every slot has
as many bags, the host need not even know how many ids a slot has (``number_batch_rows``): the
offsets of the bags tell.

Shape suffixes: N ids, S slots, W ranks, P parts, K buckets, B bags, H places of the hash table.
"""

from collections.abc import Sequence
from itertools import accumulate

import torch
import triton
import triton.language as tl

from fusedrec_torchrec.core.transfer import to_device

__all__ = ["number_batch_rows", "number_rows"]

BLOCK = 256
INSERTED = 128  # ids of a program that inserts: with more, registers are spilled
MOST_PARTS = 32  # whose keys are numbered by sums over a block, not by one atomic for each key


@triton.jit
def _slot_of(at, ends, apart, slots, STEPS: tl.constexpr):
    """Returns in which slot each position is, by bisection: how many slots end before it.

    The ends of slots are ``apart`` elements from each other, the first one after so many.
    """
    slot = at * 0
    for step in tl.static_range(STEPS):
        tried = slot + (1 << (STEPS - 1 - step))
        is_inside = tried < slots
        end = tl.load(ends + tried * apart - 1, mask=is_inside, other=0)
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
def _hashed(id_, salt, limit):
    """Returns rows of raw ids, as ``exchange/hashing.py`` has them."""
    x = (id_.to(tl.uint64) + 0x9E3779B97F4A7C15) ^ salt.to(tl.uint64)
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB
    x = x ^ (x >> 31)
    return ((x & 0x7FFFFFFFFFFFFFFF) % limit.to(tl.uint64)).to(tl.int64)


@triton.jit
def _insert(
    ids, slot_ends, rows, salts, starts, shifts, hot_table, table, place_of_id, bad,
    n, apart, slots, ranks, shift, mask, hot_shift, hot_mask,
    HASHED: tl.constexpr, HOT: tl.constexpr, STEPS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Turns ids into keys, and has each find its place in the table; who comes first takes it.

    The table holds keys plus one, so that it is empty if all is zero.  Ids behind the last slot are
    left alone.
    """
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    live = (at < n) & (at < tl.load(slot_ends + slots * apart - 1))
    id_ = tl.load(ids + at, mask=live, other=0).to(tl.int64)
    slot = _slot_of(at, slot_ends, apart, slots, STEPS)
    limit = tl.load(rows + slot, mask=live, other=1)
    if HASHED:
        is_raw = tl.load(salts + 2 * slot, mask=live, other=0) != 0
        salt = tl.load(salts + 2 * slot + 1, mask=is_raw, other=0)
        id_ = tl.where(is_raw, _hashed(id_, salt, limit), id_)
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
    tl.store(place_of_id + at, tl.where(live, place, -1).to(tl.int32), mask=at < n)
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
    BY_BUCKET: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Brings the keys together, part after part; numbers become those of all, or of the bucket."""
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
    if BY_BUCKET:
        row -= before_bucket
    tl.store(number_of_place + at, row.to(tl.int32), mask=used)


@triton.jit
def _rows_of_ids(
    place_of_id, number_of_place, rows, part_starts, counts, keys, n, parts,
    PADDED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Gives every id the number of its place; keys that are none become the size of all."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    place = tl.load(place_of_id + at, mask=at < n, other=-1)
    row = tl.load(number_of_place + place, mask=place >= 0, other=0)
    tl.store(rows + at, row, mask=at < n)
    if PADDED:
        total = at * 0
        for p in range(parts):
            total += tl.load(counts + p)
        tl.store(keys + at, at * 0 + tl.load(part_starts + parts), mask=(at >= total) & (at < n))


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

    Ids are left in their order.
    """
    assert not batch, "the bags of a batch are told by offsets, see number_batch_rows"
    ends_S = to_device(list(accumulate(counts)), ids_N.device)
    table = _Table(ids_N.numel(), part_starts_P1)
    table.insert(ids_N, ends_S, 1, rows_S, None, starts_SW, shifts_SW, hot_table)
    keys_U, rows_N = table.rows(len(slot_ends), by_bucket=True, padded=hot_table is not None)
    return keys_U, rows_N, [], table.counts_P, table.bad


def number_batch_rows(
    ids_N: torch.Tensor,
    offsets_B1: torch.Tensor,
    batch: int,
    rows_S: torch.Tensor,
    salts_S2: torch.Tensor | None,
    starts_SW: torch.Tensor,
    shifts_SW: torch.Tensor,
    part_starts_P1: torch.Tensor,
    hot_table: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Numbers the distinct rows that the ids of a batch ask for, without a count of ids.

    Args:
        ids_N: ids of a batch, slot after slot; those behind the last slot are left alone.
        offsets_B1: where bags begin.  Whatever they are, nothing is overrun.
        batch: bags of each slot.
        rows_S: of each slot's table.
        salts_S2: for each slot whether its ids are raw values, and their salt; None if none are.
        starts_SW: the first row of the table that each rank owns.
        shifts_SW: what is added to an id to get its key.
        part_starts_P1: the first key of each part.
        hot_table: finds the keys of replicas.

    Returns:
        the unique keys, part after part; for every id the number of its row among them; how many
        unique keys each part has; and whether any id is outside of its table.
    """
    table = _Table(ids_N.numel(), part_starts_P1)
    table.insert(ids_N, offsets_B1[1:], batch, rows_S, salts_S2, starts_SW, shifts_SW, hot_table)
    keys_U, rows_N = table.rows(1, by_bucket=False, padded=hot_table is not None)
    return keys_U, rows_N, table.counts_P, table.bad


class _Table:
    """The hash table of one batch.

    Args:
        ids: how many there are.
        part_starts_P1: the first key of each part.
    """

    def __init__(self, ids: int, part_starts_P1: torch.Tensor) -> None:
        device, dtype = part_starts_P1.device, part_starts_P1.dtype
        self.ids, self.parts = ids, part_starts_P1.numel() - 1
        self.part_starts_P1 = part_starts_P1
        self.bits = max((2 * ids - 1).bit_length(), 6)
        self.counts_P, self._flag, self._keys_H = _zeros(
            device, (self.parts, torch.int64), (8, torch.uint8), (1 << self.bits, dtype)
        )
        self.bad = self._flag[:1].view(torch.bool)[0]
        self._place_N = torch.empty(ids, dtype=torch.int32, device=device)

    def insert(
        self,
        ids_N: torch.Tensor,
        ends: torch.Tensor,
        apart: int,
        rows_S: torch.Tensor,
        salts_S2: torch.Tensor | None,
        starts_SW: torch.Tensor,
        shifts_SW: torch.Tensor,
        hot_table: torch.Tensor | None,
    ) -> None:
        """Has every id find its place; slots end at ``ends[apart - 1]``, and so on."""
        slots = rows_S.numel()
        if not self.ids or not apart or not slots:
            return
        hot_size = 2 if hot_table is None else hot_table.size(0)
        _insert[(triton.cdiv(self.ids, INSERTED),)](
            ids_N, ends, rows_S, rows_S if salts_S2 is None else salts_S2, starts_SW, shifts_SW,
            self._keys_H if hot_table is None else hot_table,
            self._keys_H, self._place_N, self._flag, self.ids, apart, slots, starts_SW.size(1),
            64 - self.bits, (1 << self.bits) - 1, 65 - hot_size.bit_length(), hot_size - 1,
            HASHED=salts_S2 is not None, HOT=hot_table is not None,
            STEPS=max((slots - 1).bit_length(), 1), BLOCK=INSERTED,
        )  # fmt: skip

    def rows(
        self, buckets: int, by_bucket: bool, padded: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the unique keys, and the row of every id among them.

        Args:
            buckets: of equally many parts each.
            by_bucket: whether rows of each bucket count from zero.
            padded: whether keys that are none are the size of the key space, for whoever counts.
        """
        starts, size = self.part_starts_P1, 1 << self.bits
        number_H = torch.empty(size, dtype=torch.int32, device=starts.device)
        rows_N = torch.empty(self.ids, dtype=torch.int32, device=starts.device)
        keys_U = torch.empty(self.ids, dtype=starts.dtype, device=starts.device)
        if self.ids:
            places = (triton.cdiv(size, BLOCK),)
            _number[places](
                self._keys_H, starts, number_H, self.counts_P, size, self.parts,
                BY_BLOCK=self.parts <= MOST_PARTS, BLOCK=BLOCK,
            )  # fmt: skip
            _place[places](
                self._keys_H, starts, number_H, self.counts_P, keys_U, size,
                self.parts // buckets, self.parts, BY_BUCKET=by_bucket, BLOCK=BLOCK,
            )  # fmt: skip
            _rows_of_ids[(triton.cdiv(self.ids, BLOCK),)](
                self._place_N, number_H, rows_N, starts, self.counts_P, keys_U,
                self.ids, self.parts, PADDED=padded, BLOCK=BLOCK,
            )  # fmt: skip
        return keys_U, rows_N


def _zeros(device: torch.device, *tensors: tuple[int, torch.dtype]) -> list[torch.Tensor]:
    """Returns tensors of zeros, of these sizes and types, by one kernel."""
    words = [-(-size * dtype.itemsize // 16) * 2 for size, dtype in tensors]  # aligned to 16 bytes
    pieces = torch.zeros(sum(words), dtype=torch.int64, device=device).split(words)
    return [piece.view(dtype)[:size] for piece, (size, dtype) in zip(pieces, tensors, strict=True)]
