"""Entries of rows that reach a threshold, into messages and out of them, on CUDA: codec ``dct``.

The size of a message follows from the number of its rows, so nobody waits for the device: a message
has room for some entries, and if more reach the threshold, the largest travel, of equal ones the
first.  What ``codecs/dct.py`` does with torch's operators comes out, but for the choice between
equal ones.

Scores are compared by the bits of their magnitude, which are in the same order; NaN counts as
infinity.

Where rows' entries begin is found by one program for each rank, which has few numbers to read as
long as all entries fit: one for each row, thousands at a time.  Only if they do not fit, because
the threshold is too low, it reads all rows five times.  More programs would need a launch for each
of these readings, in every step, because the host does not know whether they are needed.

Shape suffixes: R rows, D columns, E room for entries, W ranks.
"""

from collections.abc import Sequence
from itertools import accumulate

import torch
import triton
import triton.language as tl

from fusedrec_torchrec.core.gpu.kernel import kernel
from fusedrec_torchrec.core.transfer import to_device

__all__ = ["decode_entries", "encode_entries", "put_entries", "take_entries"]

BLOCK = 1024
SCANNED = 2048  # rows at a time of the one program that a rank has
FOUND = 1024  # the same on the other side: with more, registers are spilled
ELEMENTS = 1024  # of the rows that a program has in hand
ARRANGED = 4096  # of the rows that this one has, and its warps
WARPS = 16
FIELDS = 4  # of a rank: its first row, rows, first place in the room, room
INDEX = {1: torch.uint8, 2: torch.int16}


@triton.jit
def _scores(numbers, is_there, RELATIVE: tl.constexpr):
    """Returns the bits of the magnitudes that are compared; -1 where there is nothing."""
    bits = numbers.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    if RELATIVE:
        largest = tl.max(tl.where(is_there, bits, 0), 1)[:, None]
        divisor = largest.to(tl.float32, bitcast=True) + tl.zeros_like(numbers)
        share = tl.div_rn(numbers, tl.where(divisor == 0.0, 1.0, divisor))
        share = tl.where(divisor == 0.0, 1.0, share)
        bits = share.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    return tl.where(is_there, tl.minimum(bits, 0x7F800000), -1)


@triton.jit
def _block(
    rows, first, end, dim, RELATIVE: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):
    """Returns the numbers of some rows, and their scores."""
    row = first + tl.arange(0, ROWS)
    d = tl.arange(0, COLUMNS)
    is_there = (row < end)[:, None] & (d < dim)[None, :]
    numbers = tl.load(rows + row[:, None] * dim + d[None, :], mask=is_there, other=0.0)
    return numbers, _scores(numbers, is_there, RELATIVE)


@triton.jit
def _limit_of(threshold):
    """Returns the bits of a threshold; 0 if it is NaN, which everything reaches."""
    tau = tl.load(threshold)
    bits = tl.minimum(tl.maximum(tau.to(tl.int32, bitcast=True), 0), 0x7F800000)
    return tl.where(tau != tau, 0, bits)


@kernel(numbers="size", addresses="in_row")
def _count(
    rows, threshold, in_row, size, dim,
    RELATIVE: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Counts the entries of some rows that reach the threshold."""
    first = tl.program_id(0).to(tl.int64) * ROWS
    _, score = _block(rows, first, size, dim, RELATIVE, ROWS, COLUMNS)
    row = first + tl.arange(0, ROWS)
    count = tl.sum((score >= _limit_of(threshold)).to(tl.int32), 1)
    tl.store(in_row + row, count, mask=row < size)


@triton.jit
def _largest(
    rows, wanted, begin, end, dim,
    RELATIVE: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Returns the score of an entry, ``wanted`` among the largest of a rank's rows.

    And how many entries of this score are among so many.  The score is found byte by byte, the
    first one first, from counts of the entries that have the bytes found so far: four passes.
    """
    limit = tl.zeros([], tl.int32)
    byte = tl.arange(0, 256)
    for place in tl.static_range(4):
        counts = tl.zeros([256], tl.int32)
        first = begin
        while first < end:
            _, score = _block(rows, first, end, dim, RELATIVE, ROWS, COLUMNS)
            is_candidate = score >= 0
            if place > 0:
                is_candidate = is_candidate & ((score >> (32 - 8 * place)) == limit)
            own = tl.reshape((score >> (24 - 8 * place)) & 255, [ROWS * COLUMNS])
            counts += tl.histogram(own, 256, mask=tl.reshape(is_candidate, [ROWS * COLUMNS]))
            first += ROWS
        above = tl.sum(counts, 0) - tl.cumsum(counts, 0)
        is_it = (above < wanted) & (above + counts >= wanted)
        limit = (limit << 8) | tl.sum(tl.where(is_it, byte, 0), 0)
        wanted -= tl.sum(tl.where(is_it, above, 0), 0)
    return limit, wanted


@kernel(addresses="in_row ties_of_row limits")
def _arrange(
    rows, threshold, in_row, ranks, first_of_row, ties_of_row, limits, totals, dim,
    FIELDS: tl.constexpr, RELATIVE: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):  # fmt: skip
    """Finds out where each row's entries begin in the room of its rank, ``program_id(0)``.

    If there is not enough room, the limit goes up to the smallest entry that has room, and of the
    entries at the limit as many travel as there is room left for.
    """
    rank = tl.program_id(0)
    begin, count = tl.load(ranks + FIELDS * rank), tl.load(ranks + FIELDS * rank + 1)
    place, room = tl.load(ranks + FIELDS * rank + 2), tl.load(ranks + FIELDS * rank + 3)
    end = begin + count
    limit = _limit_of(threshold)
    # Where all fit.
    used = place
    first = begin
    while first < end:
        row = first + tl.arange(0, BLOCK)
        own = tl.load(in_row + row, mask=row < end, other=0)
        tl.store(first_of_row + row, used + tl.cumsum(own, 0) - own, mask=row < end)
        used += tl.sum(own, 0)
        first += BLOCK
    total = used - place
    tl.store(totals + rank, total)
    if total > room:
        limit, left = _largest(rows, room, begin, end, dim, RELATIVE, ROWS, COLUMNS)
        limit = tl.where(room > 0, limit, 0x7F800000)  # nothing is above it
        used = place
        first = begin
        while first < end:
            _, score = _block(rows, first, end, dim, RELATIVE, ROWS, COLUMNS)
            row = first + tl.arange(0, ROWS)
            above = tl.sum((score > limit).to(tl.int64), 1)
            ties = tl.sum((score == limit).to(tl.int64), 1)
            ties_before = tl.cumsum(ties, 0) - ties
            ties = tl.minimum(tl.maximum(left - ties_before, 0), ties)
            left -= tl.sum(ties, 0)
            own = above + ties
            tl.store(first_of_row + row, used + tl.cumsum(own, 0) - own, mask=row < end)
            tl.store(ties_of_row + row, ties.to(tl.int32), mask=row < end)
            used += tl.sum(own, 0)
            first += ROWS
    tl.store(limits + rank, limit)


@kernel(numbers="size", addresses="ties_of_row limits")
def _write(
    rows, ranks, first_of_row, ties_of_row, limits, totals, positions, values, where, columns,
    size, dim, width,
    FIELDS: tl.constexpr, RELATIVE: tl.constexpr, INDEXED: tl.constexpr, BLOCK: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Writes the entries of some rows of a rank, ``program_id(1)``, and some of its unused room."""
    rank = ranks + FIELDS * tl.program_id(1)
    begin, count = tl.load(rank), tl.load(rank + 1)
    place, room = tl.load(rank + 2), tl.load(rank + 3)
    end = begin + count
    total = tl.load(totals + tl.program_id(1))
    limit = tl.load(limits + tl.program_id(1))
    first = begin + tl.program_id(0).to(tl.int64) * ROWS
    numbers, score = _block(rows, first, end, dim, RELATIVE, ROWS, COLUMNS)
    row = first + tl.arange(0, ROWS)
    d = tl.arange(0, COLUMNS)
    is_row = row < end
    keep = score >= limit
    if total > room:
        tie = (score == limit).to(tl.int32)
        ties = tl.load(ties_of_row + row, mask=is_row, other=0)[:, None]
        keep = (score > limit) | ((tie > 0) & (tl.cumsum(tie, 1) - tie < ties))
    one = keep.to(tl.int32)
    at = tl.load(first_of_row + row, mask=is_row, other=0)[:, None] + tl.cumsum(one, 1) - one
    tl.store(positions + at, row[:, None] * dim + d[None, :], mask=keep)
    tl.store(values + at, numbers, mask=keep)
    if INDEXED:
        own = tl.sum(one, 1)
        tl.store(where + row, own.to(where.dtype.element_ty), mask=is_row)
        column = (d[None, :] + tl.zeros_like(one)).to(columns.dtype.element_ty)
        tl.store(columns + at, column, mask=keep)
    else:
        bits = tl.reshape(one << (d % 8)[None, :], [ROWS, COLUMNS // 8, 8])
        byte = tl.arange(0, COLUMNS // 8)
        tl.store(
            where + row[:, None] * width + byte[None, :],
            tl.sum(bits, 2).to(tl.uint8),
            mask=is_row[:, None] & (byte < width)[None, :],
        )
    unused = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    is_unused = (unused >= total) & (unused < room)
    tl.store(positions + place + unused, unused * 0 + size, mask=is_unused)
    tl.store(values + place + unused, (unused * 0).to(tl.float32), mask=is_unused)
    if INDEXED:
        zero = (unused * 0).to(columns.dtype.element_ty)
        tl.store(columns + place + unused, zero, mask=is_unused)


@kernel(addresses="where")
def _find(
    ranks, where, first_of_row, totals, width,
    FIELDS: tl.constexpr, INDEXED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Finds out where each row's entries begin in the room of its rank, ``program_id(0)``."""
    rank = tl.program_id(0)
    begin, count = tl.load(ranks + FIELDS * rank), tl.load(ranks + FIELDS * rank + 1)
    place = tl.load(ranks + FIELDS * rank + 2)
    end = begin + count
    used = place
    first = begin
    while first < end:
        row = first + tl.arange(0, BLOCK)
        if INDEXED:
            own = tl.load(where + row, mask=row < end, other=0).to(tl.int32)
        else:
            own = tl.zeros([BLOCK], tl.int32)
            for i in range(width):
                byte = tl.load(where + row * width + i, mask=row < end, other=0).to(tl.int32)
                byte -= (byte >> 1) & 0x55
                byte = (byte & 0x33) + ((byte >> 2) & 0x33)
                own += (byte + (byte >> 4)) & 0x0F
        tl.store(first_of_row + row, used + tl.cumsum(own, 0) - own, mask=row < end)
        used += tl.sum(own, 0)
        first += BLOCK
    tl.store(totals + rank, used - place)


@kernel(numbers="size", addresses="where columns values")
def _read(
    ranks, where, columns, first_of_row, totals, values, positions, out, size, dim, width,
    FIELDS: tl.constexpr, INDEXED: tl.constexpr, BLOCK: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Writes some rows of a rank, ``program_id(1)``, and the positions of their entries."""
    rank = ranks + FIELDS * tl.program_id(1)
    begin, count = tl.load(rank), tl.load(rank + 1)
    place, room = tl.load(rank + 2), tl.load(rank + 3)
    end = begin + count
    row = begin + tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    d = tl.arange(0, COLUMNS)
    is_row = row < end
    is_there = is_row[:, None] & (d < dim)[None, :]
    at = tl.load(first_of_row + row, mask=is_row, other=0)
    if INDEXED:
        own = tl.load(where + row, mask=is_row, other=0).to(tl.int32)
        numbers = tl.zeros([ROWS, COLUMNS], tl.float32)
        for i in range(tl.max(own, 0)):
            is_entry = is_row & (i < own)
            column = tl.load(columns + at + i, mask=is_entry, other=0).to(tl.int32)
            value = tl.load(values + at + i, mask=is_entry, other=0.0)
            is_it = is_entry[:, None] & (column[:, None] == d[None, :])
            numbers = tl.where(is_it, value[:, None] + 0.0, numbers)
            tl.store(positions + at + i, row * dim + column, mask=is_entry)
    else:
        byte = tl.load(where + row[:, None] * width + (d // 8)[None, :], mask=is_there, other=0).to(
            tl.int32
        )
        one = (byte >> (d % 8)[None, :]) & 1
        to = at[:, None] + tl.cumsum(one, 1) - one
        numbers = tl.load(values + to, mask=one > 0, other=0.0) + 0.0
        tl.store(positions + to, row[:, None] * dim + d[None, :], mask=one > 0)
    tl.store(out + row[:, None] * dim + d[None, :], numbers, mask=is_there)
    unused = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    is_unused = (unused >= tl.load(totals + tl.program_id(1))) & (unused < room)
    tl.store(positions + place + unused, unused * 0 + size, mask=is_unused)


@kernel(numbers="entries size")
def _take(rows, positions, values, entries, size, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    position = tl.load(positions + at, mask=at < entries, other=0)
    value = tl.load(rows + position, mask=(at < entries) & (position < size), other=0.0)
    tl.store(values + at, value, mask=at < entries)


@kernel(numbers="entries size", addresses="values")
def _put(values, positions, rows, entries, size, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    position = tl.load(positions + at, mask=at < entries, other=0)
    value = tl.load(values + at, mask=at < entries, other=0.0) + 0.0
    tl.store(rows + position, value, mask=(at < entries) & (position < size))


def _shape(dim: int) -> tuple[int, int]:
    """Returns how many rows a program takes, and a power of two of columns, at least a byte."""
    columns = max(triton.next_power_of_2(dim), 8)
    return max(ELEMENTS // columns, 1), columns


def _ranks(counts: Sequence[int], rooms: Sequence[int], device: torch.device) -> torch.Tensor:
    begins, places = accumulate(counts, initial=0), accumulate(rooms, initial=0)
    rows = zip(begins, counts, places, rooms, strict=False)
    return to_device([number for row in rows for number in row], device)


def _blocks(counts: Sequence[int], rooms: Sequence[int], rows: int) -> int:
    return max(triton.cdiv(max(counts), rows), triton.cdiv(max(rooms), BLOCK), 1)


def encode_entries(
    rows_RD: torch.Tensor,
    threshold: torch.Tensor,
    counts: Sequence[int],
    rooms: Sequence[int],
    relative: bool,
    index_bytes: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Selects the entries that reach a threshold, in the room of their rank each.

    Args:
        rows_RD: float32, contiguous.
        threshold: one number, float32.
        counts: rows of each rank.
        rooms: entries that there is room for, of each rank.
        relative: whether entries are compared in units of the largest of their row.
        index_bytes: of a column; 0 to tell by a bit for each entry which of them travel.

    Returns:
        positions_E (of unused room, that behind the last entry), values_E, bytes that say how many
        entries each row has, or which, bytes of the columns (none with bits), and how many entries
        of each rank reach the threshold.
    """
    device, (size, dim), ranks, room = rows_RD.device, rows_RD.shape, len(counts), sum(rooms)
    positions_E = torch.empty(room, dtype=torch.int64, device=device)
    values_E = torch.empty(room, dtype=torch.float32, device=device)
    width = triton.cdiv(dim, 8)
    dtype = INDEX.get(index_bytes, torch.uint8)
    where = torch.empty(size * (1 if index_bytes else width), dtype=dtype, device=device)
    columns_E = torch.empty(room if index_bytes else 0, dtype=dtype, device=device)
    if not size:
        totals_W = torch.zeros(ranks, dtype=torch.int64, device=device)
        return positions_E, values_E, where.view(torch.uint8), columns_E.view(torch.uint8), totals_W
    totals_W = torch.empty(ranks, dtype=torch.int64, device=device)
    in_row, ties, limits = torch.empty(2 * size + ranks, dtype=torch.int32, device=device).split(
        [size, size, ranks]
    )
    first = torch.empty(size, dtype=torch.int64, device=device)
    rows, columns = _shape(dim)
    of_ranks = _ranks(counts, rooms, device)
    shape = {"RELATIVE": relative, "ROWS": rows, "COLUMNS": columns}
    fewer = {**shape, "ROWS": max(rows // 2, 1)}  # so that registers are enough
    _count[(triton.cdiv(size, rows),)](rows_RD, threshold, in_row, size, dim, **shape)
    _arrange[(ranks,)](
        rows_RD, threshold, in_row, of_ranks, first, ties, limits, totals_W, dim,
        FIELDS=FIELDS, BLOCK=SCANNED, RELATIVE=relative, ROWS=max(ARRANGED // columns, 1),
        COLUMNS=columns, num_warps=WARPS,
    )  # fmt: skip
    _write[(_blocks(counts, rooms, fewer["ROWS"]), ranks)](
        rows_RD, of_ranks, first, ties, limits, totals_W, positions_E, values_E, where, columns_E,
        size * dim, dim, width, FIELDS=FIELDS, INDEXED=index_bytes > 0, BLOCK=BLOCK, **fewer,
    )  # fmt: skip
    return positions_E, values_E, where.view(torch.uint8), columns_E.view(torch.uint8), totals_W


def decode_entries(
    values_E: torch.Tensor,
    where: torch.Tensor,
    columns: torch.Tensor,
    counts: Sequence[int],
    rooms: Sequence[int],
    index_bytes: int,
    out_RD: torch.Tensor,
) -> torch.Tensor:
    """Writes rows of the entries that have come, and returns the positions of these.

    Args:
        values_E: float32, contiguous.
        where: see ``encode_entries``; aligned for numbers of ``index_bytes``.
        columns: see ``encode_entries``.
        counts: rows of each rank.
        rooms: entries that there is room for, of each rank.
        index_bytes: of a column; 0 if there is a bit for each entry.
        out_RD: float32, contiguous.
    """
    device, (size, dim), ranks = out_RD.device, out_RD.shape, len(counts)
    positions_E = torch.empty(sum(rooms), dtype=torch.int64, device=device)
    if not size:
        return positions_E
    dtype = INDEX.get(index_bytes, torch.uint8)
    where, columns = where.view(dtype), columns.view(dtype)
    first = torch.empty(size, dtype=torch.int64, device=device)
    totals_W = torch.empty(ranks, dtype=torch.int64, device=device)
    of_ranks, width = _ranks(counts, rooms, device), triton.cdiv(dim, 8)
    rows, padded = _shape(dim)
    _find[(ranks,)](
        of_ranks, where, first, totals_W, width,
        FIELDS=FIELDS, INDEXED=index_bytes > 0, BLOCK=FOUND, num_warps=WARPS,
    )  # fmt: skip
    _read[(_blocks(counts, rooms, rows), ranks)](
        of_ranks, where, columns, first, totals_W, values_E, positions_E, out_RD,
        size * dim, dim, width,
        FIELDS=FIELDS, INDEXED=index_bytes > 0, BLOCK=BLOCK, ROWS=rows, COLUMNS=padded,
    )  # fmt: skip
    return positions_E


def take_entries(rows_RD: torch.Tensor, positions_E: torch.Tensor) -> torch.Tensor:
    """Returns the numbers at positions of the flattened rows; zero for those behind the last."""
    entries = positions_E.numel()
    values_E = torch.empty(entries, dtype=rows_RD.dtype, device=rows_RD.device)
    if entries:
        _take[(triton.cdiv(entries, BLOCK),)](
            rows_RD, positions_E, values_E, entries, rows_RD.numel(), BLOCK=BLOCK
        )
    return values_E


def put_entries(values_E: torch.Tensor, positions_E: torch.Tensor, out_RD: torch.Tensor) -> None:
    """Writes numbers to positions of the flattened rows, and zeros everywhere else."""
    out_RD.zero_()
    if positions_E.numel():
        _put[(triton.cdiv(positions_E.numel(), BLOCK),)](
            values_E, positions_E, out_RD, positions_E.numel(), out_RD.numel(), BLOCK=BLOCK
        )
