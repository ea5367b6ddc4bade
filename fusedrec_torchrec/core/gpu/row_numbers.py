"""Ids to the distinct rows that they ask for, on CUDA: what ``row_numbers.h`` does on CPU.

Ids find their places in a hash table, those with the same key the same one.  Whoever takes an empty
place takes the next number of its part, too; the others of the same key count themselves at the
place.  When all are in, a second kernel knows how many keys each part has: every id takes the
number of its place, and every row gets room for its ids, a *segment*, for the sums of gradients
(``row_gradients``).  No kernel reads what another program of the same launch has written, but by
atomic operations.  Which of two keys of a part comes first is left to chance, so whoever wants the
same sums in every run sorts instead (``exchange/dedup.py``).

Nothing comes to the host: ``keys_U`` is as long as there are ids, and what is behind the unique
ones means nothing, or, if there are hot rows, is the size of the key space.  Where every slot has
as many bags, the host need not even know how many ids a slot has (``number_batch_rows``): the
offsets of the bags tell.

Shape suffixes: N ids, S slots, W ranks, P parts, K buckets, B bags, U distinct rows.
"""

from collections.abc import Sequence
from itertools import accumulate

import torch
import triton
import triton.language as tl

from fusedrec_torchrec.core.gpu.kernel import kernel
from fusedrec_torchrec.core.gpu.segments import FEW, PIECE, check_ids, places_for
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
def _first_place(key, size):
    """Returns the place where the search for a key begins, in a table of any size."""
    product = key.to(tl.uint64) * 0x9E3779B97F4A7C15
    return (((product >> 32) * size.to(tl.uint64)) >> 32).to(tl.int64)


@triton.jit
def _part_of(key, part_starts, parts):
    part = (key * 0).to(tl.int32)
    for p in range(1, parts):
        part += (key >= tl.load(part_starts + p)).to(tl.int32)
    return part


@triton.jit
def _next_numbers(part, is_new, counts, parts, BY_BLOCK: tl.constexpr):
    """Takes the next numbers of their parts for new keys; the first of each part for all."""
    if BY_BLOCK:
        number, total = part * 0, part * 0
        for p in range(parts):
            own = (is_new & (part == p)).to(tl.int32)
            number += own * (tl.cumsum(own, 0) - own)
            total += own * tl.sum(own, 0)
        is_first = is_new & (number == 0)
        taken = tl.atomic_add(counts + part, total.to(tl.int64), mask=is_first).to(tl.int32)
        taken = tl.where(is_first, taken, 0)
        for p in range(parts):
            own = (is_new & (part == p)).to(tl.int32)
            number += own * tl.sum(own * taken, 0)
    else:
        number = tl.atomic_add(counts + part, is_new.to(tl.int64), mask=is_new).to(tl.int32)
    return number


@kernel(numbers="n apart size hot_shift hot_mask", addresses="ids slot_ends")
def _insert(
    ids, slot_ends, rows, salts, starts, shifts, hot_table, part_starts,
    table, number_of_place, counts, place_of_id, ranks_of_ids, bad,
    n, apart, slots, ranks, parts, size, hot_shift, hot_mask,
    HASHED: tl.constexpr, HOT: tl.constexpr, GROUPED: tl.constexpr, STEPS: tl.constexpr,
    BY_BLOCK: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Turns ids into keys, and has each find its place in the table; who comes first takes it.

    The table holds keys plus one, so that it is empty if all is zero, and, if ids are to be
    ``GROUPED`` by row, behind each key how many more ids it has.  The place of a new key is written
    as minus two minus the place.  Ids behind the last slot are left alone.
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
    tl.store(bad + at * 0, (at * 0 + 1).to(tl.uint8), mask=is_bad)
    id_ = tl.where(is_bad, 0, id_)
    owner = slot * 0
    for rank in range(1, ranks):
        owner += (id_ >= tl.load(starts + slot * ranks + rank, mask=live, other=0)).to(tl.int64)
    key = id_ + tl.load(shifts + slot * ranks + owner, mask=live, other=0)
    if HOT:
        key = _replica_of(key, hot_table, hot_shift, hot_mask, live)
    words = 2 if GROUPED else 1
    place = _first_place(key, size)
    wanted = (key + 1).to(table.dtype.element_ty)
    is_open, is_new = live, live & (at < 0)
    while tl.max(is_open.to(tl.int32), 0) > 0:
        # A key that many ids have is read by them, and not fought for.
        held = tl.load(table + place * words, mask=is_open, other=1)
        is_empty = is_open & (held == 0)
        if tl.max(is_empty.to(tl.int32), 0) > 0:
            # All take part: who wants nothing changes zero to zero, at a place of its own.
            target = tl.where(is_empty, place, tl.where(at < n, at, 0))
            new = tl.where(is_empty, wanted, 0).to(wanted.dtype)
            before = tl.atomic_cas(table + target * words, tl.zeros_like(new), new)
            held = tl.where(is_empty, before, held)
            is_new = is_new | (is_empty & (before == 0))
        is_open = is_open & (held != 0) & (held != wanted)
        next_ = place + 1
        place = tl.where(is_open, tl.where(next_ == size, 0, next_), place)
    if GROUPED:
        one = (at * 0 + 1).to(wanted.dtype)
        rank = tl.atomic_add(table + place * words + 1, one, mask=live & (~is_new)) + 1
        tl.store(ranks_of_ids + at, tl.where(is_new, 0, rank).to(tl.int32), mask=live)
    part = _part_of(key, part_starts, parts)
    number = _next_numbers(part, is_new, counts, parts, BY_BLOCK)
    tl.store(number_of_place + place, number, mask=is_new)
    told = tl.where(is_new, -2 - place, tl.where(live, place, -1))
    tl.store(place_of_id + at, told.to(tl.int32), mask=at < n)


@triton.jit
def _segments(row, count, is_new, cursors, segments, n, FEW: tl.constexpr, PIECE: tl.constexpr):
    """Gives new rows room for their ids: those that have many, whole pieces behind all others."""
    is_long = is_new & (count > FEW)
    few = tl.where(is_new & (~is_long), count, 0)
    pieces = tl.where(is_long, (count + PIECE - 1) // PIECE, 0)
    start = tl.cumsum(few, 0) - few
    wanted = tl.sum(few, 0)
    if wanted > 0:
        start += tl.atomic_add(cursors, wanted)
    wanted = tl.sum(pieces, 0)
    if wanted > 0:
        first = tl.atomic_add(cursors + 1, wanted) + tl.cumsum(pieces, 0) - pieces
        start = tl.where(is_long, n + first * PIECE, start)
    tl.store(segments + 2 * row, start, mask=is_new)
    tl.store(segments + 2 * row + 1, count, mask=is_new)


@kernel(numbers="n")
def _rows_of_ids(
    table, part_starts, number_of_place, counts, cursors, rows, keys, segments,
    n, owners, parts,
    BY_BUCKET: tl.constexpr, PADDED: tl.constexpr, GROUPED: tl.constexpr, FEW: tl.constexpr,
    PIECE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Turns the places of ids into rows, of all or of the bucket; new keys go to theirs.

    Keys that are none become the size of all, if that is asked for.
    """
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    told = tl.load(rows + at, mask=at < n, other=-1).to(tl.int64)
    is_new = told < -1
    place = tl.where(is_new, -2 - told, told)
    live = place >= 0
    words = 2 if GROUPED else 1
    key = tl.load(table + place * words, mask=live, other=1) - 1
    part = _part_of(key, part_starts, parts)
    row, before_bucket = part * 0, part * 0  # in 32 bits: with 64 registers would be spilled
    for p in range(parts):
        count = tl.load(counts + p).to(tl.int32)
        row += tl.where(part > p, count, 0)
        before_bucket += tl.where(part // owners * owners > p, count, 0)
    row += tl.load(number_of_place + place, mask=live, other=0)
    tl.store(keys + row, key, mask=is_new)
    if GROUPED:
        more = tl.load(table + place * words + 1, mask=is_new, other=0).to(tl.int32)
        _segments(row, more + 1, is_new, cursors, segments, n, FEW, PIECE)
    if BY_BUCKET:
        row -= before_bucket
    tl.store(rows + at, tl.where(live, row, 0).to(tl.int32), mask=at < n)
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
    table = _Table(ids_N.numel(), part_starts_P1, grouped=False)
    table.insert(ids_N, ends_S, 1, rows_S, None, starts_SW, shifts_SW, hot_table)
    keys_U = table.keys(len(slot_ends), by_bucket=True, padded=hot_table is not None)
    return keys_U, table.rows_N, [], table.counts_P, table.bad


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
) -> tuple[torch.Tensor, ...]:
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
        unique keys each part has; whether any id is outside of its table; and which ids a row has:
        for every id its number among those of its row, for every row where these begin and how many
        they are, and how many ids and pieces are in segments.
    """
    table = _Table(ids_N.numel(), part_starts_P1, grouped=True)
    table.insert(ids_N, offsets_B1[1:], batch, rows_S, salts_S2, starts_SW, shifts_SW, hot_table)
    keys_U = table.keys(1, by_bucket=False, padded=hot_table is not None)
    occurrences = (table.ranks_N, table.segments_U2, table.cursors)
    return keys_U, table.rows_N, table.counts_P, table.bad, *occurrences


class _Table:
    """The hash table of one batch.

    Args:
        ids: how many there are.
        part_starts_P1: the first key of each part.
        grouped: whether it is to be known which ids a row has.
    """

    def __init__(self, ids: int, part_starts_P1: torch.Tensor, grouped: bool) -> None:
        check_ids(ids)
        device, dtype = part_starts_P1.device, part_starts_P1.dtype
        self.ids, self.parts = ids, part_starts_P1.numel() - 1
        self.part_starts_P1 = part_starts_P1
        self._size, self._grouped = places_for(ids), grouped
        self.counts_P, self.cursors, self._flag, self._table = _zeros(
            device,
            (self.parts, torch.int64),
            (2, torch.int32),
            (8, torch.uint8),
            (self._size * (2 if grouped else 1), dtype),
        )
        self.bad = self._flag[:1].view(torch.bool)[0]
        # Places of ids, until all of them are in.
        self.rows_N = torch.empty(ids, dtype=torch.int32, device=device)
        self.ranks_N = torch.empty(ids if grouped else 0, dtype=torch.int32, device=device)
        self.segments_U2 = torch.empty((ids if grouped else 0, 2), dtype=torch.int32, device=device)
        self._numbers = torch.empty(self._size, dtype=torch.int32, device=device)

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
        if not self.ids:
            return
        if not apart or not slots:
            self.rows_N.fill_(-1)
            return
        hot_size = 2 if hot_table is None else hot_table.size(0)
        _insert[(triton.cdiv(self.ids, INSERTED),)](
            ids_N, ends, rows_S, rows_S if salts_S2 is None else salts_S2, starts_SW, shifts_SW,
            self._table if hot_table is None else hot_table, self.part_starts_P1,
            self._table, self._numbers, self.counts_P, self.rows_N, self.ranks_N, self._flag,
            self.ids, apart, slots, starts_SW.size(1), self.parts, self._size,
            65 - hot_size.bit_length(), hot_size - 1,
            HASHED=salts_S2 is not None, HOT=hot_table is not None, GROUPED=self._grouped,
            STEPS=max((slots - 1).bit_length(), 1), BY_BLOCK=self.parts <= MOST_PARTS,
            BLOCK=INSERTED,
        )  # fmt: skip

    def keys(self, buckets: int, by_bucket: bool, padded: bool) -> torch.Tensor:
        """Returns the unique keys; from now on ``rows_N`` are the rows of ids among them.

        Args:
            buckets: of equally many parts each.
            by_bucket: whether rows of each bucket count from zero.
            padded: whether keys that are none are the size of the key space, for whoever counts.
        """
        starts = self.part_starts_P1
        keys_U = torch.empty(self.ids, dtype=starts.dtype, device=starts.device)
        if self.ids:
            _rows_of_ids[(triton.cdiv(self.ids, BLOCK),)](
                self._table, starts, self._numbers, self.counts_P, self.cursors, self.rows_N,
                keys_U, self.segments_U2, self.ids, self.parts // buckets, self.parts,
                BY_BUCKET=by_bucket, PADDED=padded, GROUPED=self._grouped, FEW=FEW, PIECE=PIECE,
                BLOCK=BLOCK,
            )  # fmt: skip
        return keys_U


def _zeros(device: torch.device, *tensors: tuple[int, torch.dtype]) -> list[torch.Tensor]:
    """Returns tensors of zeros, of these sizes and types, by one kernel."""
    words = [-(-size * dtype.itemsize // 16) * 2 for size, dtype in tensors]  # aligned to 16 bytes
    pieces = torch.zeros(sum(words), dtype=torch.int64, device=device).split(words)
    return [piece.view(dtype)[:size] for piece, (size, dtype) in zip(pieces, tensors, strict=True)]
