"""What our own kernels compute of ids and bags: as C++ operators do, in shapes of the device."""

from collections.abc import Iterator
from typing import Any

import torch

from fusedrec_torchrec.core.gpu.messages import SLACK_ONE
from fusedrec_torchrec.exchange.hashing import hash_ids
from tests.emulated_cuda.oracles import LEAVE, oracle

INT32_MAX = torch.iinfo(torch.int32).max


@oracle("fusedrec::bad_lengths")
def bad_lengths(
    lengths: torch.Tensor, offsets: torch.Tensor, ids: int, strides: list[int], counts: list[int]
) -> torch.Tensor:
    sums = [int(part.sum()) for part in lengths.split(strides)]
    fits = bool(offsets[0] == 0) and offsets.diff().equal(lengths) and sum(sums) == ids
    return torch.tensor(not fits or sums != (counts or sums) or bool((lengths < 0).any()))


@oracle("fusedrec::number_batch_rows")
def number_batch_rows(
    ids: torch.Tensor,
    offsets: torch.Tensor,
    batch: int,
    rows: torch.Tensor,
    salts: torch.Tensor | None,
    starts: torch.Tensor,
    shifts: torch.Tensor,
    part_starts: torch.Tensor,
    hot_table: torch.Tensor | None,
) -> Any:
    """Unique keys are as many as ids; rows are numbered over all buckets.

    Which ids a row has is for ``slot_row_sums``, and its oracle looks for itself.
    """
    ends = offsets[:: max(batch, 1)][: rows.numel() + 1]
    counts = ends.diff().tolist() if batch else [0] * rows.numel()
    keys_U = torch.full((ids.numel(),), int(part_starts[-1]), dtype=part_starts.dtype)
    rows_N = torch.zeros(ids.numel(), dtype=torch.int32)
    row_ids = (torch.zeros_like(rows_N), rows_N.new_zeros(ids.numel(), 2), rows_N.new_zeros(2))
    own = int(ends[-1]) if batch else 0
    if min(counts) < 0 or own > ids.numel():  # lengths are wrong: nothing is overrun
        counts_P = torch.zeros(part_starts.numel() - 1, dtype=torch.int64)
        return keys_U, rows_N, counts_P, torch.tensor(False), *row_ids
    values = ids[:own]
    if salts is not None:
        salts_N, rows_of_N = (
            x.repeat_interleave(torch.tensor(counts), dim=0) for x in (salts, rows)
        )
        values = torch.where(
            salts_N[:, 0] != 0, hash_ids(values, salts_N[:, 1], rows_of_N), values.long()
        )
    none, one_bucket = torch.empty(0, dtype=torch.int32), [rows.numel()]
    unique, numbers, _, counts_P, bad = torch.ops.fusedrec.number_rows(
        values, none, counts, rows, starts, shifts, part_starts, hot_table, one_bucket, 0
    )
    keys_U[: unique.numel()] = unique
    rows_N[:own] = numbers
    return keys_U, rows_N, counts_P, bad, *row_ids


def _bags_of_slots(
    slots: torch.Tensor, offsets: torch.Tensor, batch: int, lines: torch.Tensor
) -> Iterator[tuple[int, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]]:
    """Yields for each slot dimension, positions of its ids, the sample of each, divisors, columns.

    Columns are a view of ``lines``, a line for each sample.
    """
    for slot, (dim, column, mean, *varies) in enumerate(slots.tolist()):
        first, bags = varies or (slot * batch, batch)
        bounds = offsets[first : first + bags + 1].long()
        at = torch.arange(int(bounds[0]), int(bounds[-1]))
        lengths = bounds.diff()
        divisor = lengths.clamp(min=1) if mean else torch.ones_like(lengths)
        columns = (
            lines.view(-1)[column : column + bags * dim].view(bags, dim)
            if varies
            else lines[:, column : column + dim]
        )
        sample = torch.arange(bags).repeat_interleave(lengths)
        yield dim, at, sample, divisor[:, None].float(), columns


def _places_of(
    rows: torch.Tensor, at: torch.Tensor, addresses: torch.Tensor | None, dim: int
) -> torch.Tensor:
    row = rows[at].long()
    begin = row * dim if addresses is None else addresses[row]
    return begin[:, None] + torch.arange(dim)


@oracle("fusedrec::slot_bag_sums")
def slot_bag_sums(
    flat: torch.Tensor,
    addresses: torch.Tensor | None,
    dims: list[int],
    slots: torch.Tensor,
    rows: torch.Tensor,
    offsets: torch.Tensor,
    weights: torch.Tensor | None,
    batch: int,
    out: torch.Tensor,
) -> None:
    for dim, at, sample, divisor, columns in _bags_of_slots(slots, offsets, batch, out):
        values = flat[_places_of(rows, at, addresses, dim)].float()
        if weights is not None:
            values = values * weights[at][:, None]
        sums = torch.zeros(columns.shape).index_add_(0, sample, values)
        columns.copy_(sums / divisor)


@oracle("fusedrec::slot_row_sums")
def slot_row_sums(
    gradient: torch.Tensor,
    addresses: torch.Tensor | None,
    dims: list[int],
    slots: torch.Tensor,
    rows: torch.Tensor,
    offsets: torch.Tensor,
    weights: torch.Tensor | None,
    ranks: torch.Tensor,
    segments: torch.Tensor,
    cursors: torch.Tensor,
    batch: int,
    bags: int,
    num_rows: int,
    scale: float,
    out: torch.Tensor,
) -> None:
    """Rows of slots are overwritten, and no others."""
    of_slots = list(_bags_of_slots(slots, offsets, batch, gradient))
    assert bags == sum(len(columns) for *_, columns in of_slots)
    for dim, at, _, _, _ in of_slots:
        assert not at.numel() or int(rows[at].max()) < num_rows
        out[_places_of(rows, at, addresses, dim)] = 0.0
    for dim, at, sample, divisor, columns in of_slots:
        values = (columns.float() * scale / divisor)[sample]
        if weights is not None:
            values = values * weights[at][:, None]
        places = _places_of(rows, at, addresses, dim)
        out.index_put_((places.flatten(),), values.flatten(), accumulate=True)


@oracle("fusedrec::slot_weight_sums")
def slot_weight_sums(
    gradient: torch.Tensor,
    flat: torch.Tensor,
    addresses: torch.Tensor | None,
    dims: list[int],
    slots: torch.Tensor,
    rows: torch.Tensor,
    offsets: torch.Tensor,
    batch: int,
    out: torch.Tensor,
) -> None:
    for dim, at, sample, divisor, columns in _bags_of_slots(slots, offsets, batch, gradient):
        values = flat[_places_of(rows, at, addresses, dim)].float()
        out[at] = (values * (columns.float() / divisor)[sample]).sum(1)


def _positions(
    slots: torch.Tensor, offsets: torch.Tensor
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yields for each slot the positions of its ids in the batch, and the places of weights."""
    for first, bags, start, _ in slots.tolist():
        bounds = offsets[first : first + bags + 1].long()
        at = torch.arange(int(bounds[0]), int(bounds[-1]))
        yield at, start + at - bounds[:-1].repeat_interleave(bounds.diff())


@oracle("fusedrec::position_weights")
def position_weights(
    weights: torch.Tensor, slots: torch.Tensor, offsets: torch.Tensor, batch: int, ids: int
) -> torch.Tensor:
    out = torch.full((ids,), float("nan"))
    for at, places in _positions(slots, offsets):
        out[at] = weights[places]
    return out


@oracle("fusedrec::position_sums")
def position_sums(
    gradient: torch.Tensor,
    slots: torch.Tensor,
    offsets: torch.Tensor,
    batch: int,
    out: torch.Tensor,
) -> None:
    for at, places in _positions(slots, offsets):
        out.index_put_((places,), gradient[at], accumulate=True)


@oracle("fusedrec::take_slots")
def take_slots(
    ids: torch.Tensor,
    weights: torch.Tensor | None,
    offsets: torch.Tensor,
    places: torch.Tensor,
    bags: int,
    room: int,
    refused: torch.Tensor | None,
) -> tuple[torch.Tensor, ...]:
    """Behind the last id are numbers that nobody may look at."""
    bounds = offsets.long().clamp(0, ids.numel())
    if refused is not None and bool(refused):
        bounds.zero_()
    own, ends = [], places[0].tolist()
    for begin, end, first in zip([0, *ends], ends, places[1].tolist(), strict=False):
        own.append(torch.arange(first, first + end - begin))
    bag_B = torch.cat(own)
    lengths = (bounds[1:] - bounds[:-1])[bag_B].clamp(min=0)
    starts = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])
    total = int(starts[-1])
    at = bounds[bag_B].repeat_interleave(lengths) + torch.arange(total)
    at -= starts[:-1].repeat_interleave(lengths)
    out = torch.full((room,), -(1 << 30), dtype=ids.dtype)
    out[:total] = ids[at][:room]
    out_weights = torch.empty(0)
    if weights is not None:
        out_weights = torch.full((room,), float("nan"), dtype=weights.dtype)
        out_weights[:total] = weights[at][:room]
    return out, out_weights, lengths.int(), starts.int()


@oracle("fusedrec::hash_slots")
def hash_slots(
    ids: torch.Tensor, ends: torch.Tensor, rows: torch.Tensor, salts: torch.Tensor
) -> torch.Tensor:
    slot = torch.searchsorted(ends.long().cummax(0)[0], torch.arange(ids.numel()), right=True)
    slot = slot.clamp(max=rows.numel() - 1)
    hashed = hash_ids(ids, salts[slot, 1], rows[slot])
    return torch.where(salts[slot, 0] != 0, hashed, ids.long())


@oracle("fusedrec::number_rows")
def number_rows(**arguments: Any) -> Any:
    """Unique keys are as many as ids."""
    ids, starts = arguments["ids"].numel(), arguments["part_starts"]
    keys_U = torch.full((ids,), int(starts[-1]), dtype=starts.dtype)
    try:
        unique, rows_N, offsets, counts_P, bad = torch.ops.fusedrec.number_rows(**arguments)
    except RuntimeError:  # of counts that are wrong: a kernel overruns nothing, and goes on
        counts_P = torch.zeros(starts.numel() - 1, dtype=torch.int64)
        return keys_U, torch.zeros(ids, dtype=torch.int32), [], counts_P, torch.tensor(False)
    keys_U[: unique.numel()] = unique
    return keys_U, rows_N, offsets, counts_P, bad


@oracle("fusedrec::ask_bags")
def ask_bags(
    ids: torch.Tensor,
    starts: torch.Tensor,
    weights: torch.Tensor | None,
    places: torch.Tensor,
    cells: int,
    tables: torch.Tensor,
    rows: torch.Tensor,
    means: torch.Tensor | None,
    ends: torch.Tensor,
    shards: torch.Tensor,
    buckets: int,
    ranks: int,
    refused: torch.Tensor | None,
) -> tuple[torch.Tensor, ...]:
    """Distinct bags are those of the C++ operator; units are counted cell by cell."""
    slots, parts = tables.numel(), buckets * ranks
    bag_ends, runs, firsts, steps, part_cells = _split_places(places, ends, shards, parts)
    bags = bag_ends.diff(prepend=bag_ends.new_zeros(1)).tolist()
    counts = torch.zeros(2 * buckets, ranks, dtype=torch.int64)
    cells_C, sums = torch.zeros(cells, dtype=torch.int32), torch.zeros(cells + 1).long()
    divisor = torch.ones(0 if means is None else cells)
    looks = torch.ones(slots, dtype=torch.bool)
    if refused is not None and bool(refused):
        return counts, cells_C, divisor, sums, torch.tensor(False)
    lengths, of_slots = starts.diff(), slice(int(starts[0]), int(starts[-1]))
    ids, weights = ids[of_slots], None if weights is None else weights[of_slots]
    try:
        number_B = torch.ops.fusedrec.distinct_bags(
            ids, lengths, weights, bags, tables, looks, 0.0
        )[0].long()
    except RuntimeError:  # of lengths that are wrong: a kernel overruns nothing, and goes on
        return counts, cells_C, divisor, sums, torch.tensor(False)
    slot_B = torch.arange(slots).repeat_interleave(torch.tensor(bags))
    slot_N = slot_B.repeat_interleave(lengths)
    bad = ((ids < 0) | (ids >= rows[slot_N])).any()
    filled, bag_B = lengths > 0, torch.arange(lengths.numel())
    first_B = bag_B.clone()
    first_G = torch.full((int(number_B.max()) + 1 if bag_B.numel() else 0,), bag_B.numel())
    first_G.scatter_reduce_(0, number_B[filled], bag_B[filled], "amin")
    first_B[filled] = first_G[number_B[filled]]
    unit_B = torch.where(filled & (first_B == bag_B), (1 << 32) + lengths.long(), 0)

    def own_cells(slot: int) -> list[tuple[int, torch.Tensor]]:
        own = bag_B[slot_B == slot]
        begin = int(ends[slot - 1]) if slot else 0
        return [(x, own) for x in range(begin, int(ends[slot]))]

    begin_B = (bag_ends - torch.tensor(bags))[slot_B] if bag_B.numel() else bag_B
    for s in range(slots):
        for x, own in own_cells(s):
            sums[1 + runs[x] + own - begin_B[own]] = unit_B[own]
    sums = sums.cumsum(0)
    of_parts = sums[part_cells]
    counts[:buckets] = (of_parts >> 32).diff().view(buckets, ranks)
    counts[buckets:] = (of_parts & 0xFFFFFFFF).diff().view(buckets, ranks)
    for s in range(slots):
        for x, own in own_cells(s):
            begin, end = part_cells[shards[0, x] * ranks], part_cells[(shards[0, x] + 1) * ranks]
            first, column = first_B[own], x - (int(ends[s - 1]) if s else 0)
            shard = ends[slot_B[first]] - ends.diff(prepend=ends.new_zeros(1))[slot_B[first]]
            cell = torch.where(filled[own], runs[shard + column] + first - begin_B[first], end)
            to = firsts[x] + steps[x] * (own - begin_B[own])
            cells_C[to] = ((sums[cell] >> 32) - (sums[begin] >> 32)).int()
            if means is not None and means[s]:
                divisor[to] = lengths[own].clamp(min=1).float()
    return counts, cells_C, divisor, sums, bad


def _split_places(
    places: torch.Tensor, ends: torch.Tensor, shards: torch.Tensor, parts: int
) -> tuple[torch.Tensor, ...]:
    return places.split([ends.numel(), *[shards.size(1)] * 3, parts + 1])


@oracle("fusedrec::pack_units")
def pack_units(
    ids: torch.Tensor,
    weights: torch.Tensor | None,
    places: torch.Tensor,
    ends: torch.Tensor,
    shards: torch.Tensor,
    starts: torch.Tensor,
    sums: torch.Tensor,
    counts: torch.Tensor,
    row_counts: torch.Tensor | None,
    word_starts: list[int],
    words: torch.Tensor,
    refused: torch.Tensor | None,
) -> Any:
    """Units of a part are those of its cells, in order; the C++ operator writes them."""
    if refused is not None and bool(refused):
        return LEAVE
    buckets, ranks = counts.size(0) // 2, counts.size(1)
    bag_ends = _split_places(places, ends, shards, buckets * ranks)[0]
    bags_S = bag_ends.diff(prepend=bag_ends.new_zeros(1))
    slot_X = torch.arange(ends.numel()).repeat_interleave(ends.diff(prepend=ends.new_zeros(1)))
    order = torch.argsort(shards[0] * ranks + shards[1], stable=True)
    of_slots = torch.arange(int(bags_S.sum())).split(bags_S.tolist())
    bag_C = torch.cat([of_slots[s] for s in slot_X[order].tolist()])
    row_C = shards[2][order].repeat_interleave(bags_S[slot_X[order]])
    is_unit = (sums >> 32).diff() > 0
    begins = list(word_starts)
    if row_counts is not None:
        begins = [a + b for a, b in zip(begins, row_counts.sum(0).tolist(), strict=False)]
    bag_U, row_U = bag_C[is_unit].int(), row_C[is_unit].int()
    own = slice(int(starts[0]), int(starts[-1]))
    ids, weights = ids[own], None if weights is None else weights[own]
    try:
        return torch.ops.fusedrec.pack_bags(
            ids, starts.diff(), weights, bag_U, row_U,
            counts[:buckets].contiguous(), counts[buckets:].contiguous(), begins, words,
        )  # fmt: skip
    except RuntimeError:  # they do not fit: what is written means nothing
        return LEAVE


@oracle("fusedrec::pack_rows")
def pack_rows(**arguments: Any) -> Any:
    try:
        return torch.ops.fusedrec.pack_rows(**arguments)
    except RuntimeError:  # they do not fit: what is written means nothing
        return LEAVE


@oracle("fusedrec::ask_owners")
def ask_owners(
    statuses: list[torch.Tensor],
    counts: torch.Tensor,
    ranks: int,
    row_buckets: int,
    stale: bool,
) -> torch.Tensor:
    words = [max(map(int, statuses)), bool(counts[:, :ranks].any()), stale]
    return torch.tensor([*words, *counts[:row_buckets, ranks:].flatten()], dtype=torch.int32)


@oracle("fusedrec::write_headers")
def write_headers(
    statuses: list[torch.Tensor],
    counts: torch.Tensor,
    messages: torch.Tensor,
    capacity: int,
    granule: int,
    slack: int,
    stale: bool,
    bag_buckets: int,
    words_per_id: int,
) -> None:
    ranks, lines = messages.size(0), counts.size(0)
    rows = lines - 2 * bag_buckets
    words = int(_words(counts, ranks, bag_buckets, words_per_id).max())
    unit = SLACK_ONE * granule
    wanted = min((words * slack + unit - 1) // unit * granule, INT32_MAX) if slack else 0
    messages[:, :3] = torch.tensor([max(map(int, statuses)), wanted, int(words > capacity)])
    messages[:, 3 : 3 + lines] = counts[:, :ranks].t()
    if counts.size(1) > ranks:
        messages[:, 3 + lines] = int(stale)
        messages[:, 4 + lines : 4 + lines + rows] = counts[:rows, ranks]


def _words(counts: torch.Tensor, ranks: int, bag_buckets: int, words_per_id: int) -> torch.Tensor:
    units = counts.size(0) - bag_buckets
    counts = counts[:, :ranks]
    return counts[:units].sum(0) + words_per_id * counts[units:].sum(0)


@oracle("fusedrec::collect_headers")
def collect_headers(
    messages: torch.Tensor,
    header: int,
    counts: torch.Tensor,
    statuses: torch.Tensor,
    bag_buckets: int,
    words_per_id: int,
) -> torch.Tensor:
    words_W = _words(counts, messages.size(0), bag_buckets, words_per_id)
    units = counts[: counts.size(0) - bag_buckets]
    parts = [messages[:, :header], units.t(), words_W, statuses]
    return torch.cat([part.flatten().int() for part in parts])
