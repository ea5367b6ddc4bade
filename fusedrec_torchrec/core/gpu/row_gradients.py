"""Gradients of bags to sums of rows for all slots of a batch at once, on CUDA.

``row_numbers`` has told how many ids each row has, and has given it a *segment*: room for their
bags.  A first kernel writes the bags of all ids there; a second one sums up the gradients of each
row's bags, so that a row is written once and never read, and needs no zeros.  Rows with more than a
few ids are not left to one program.  Their segments consist of whole pieces behind all others, of
which programs take one after another, and add what they have to the row by atomic additions; the
first kernel fills these rows, and no others, with zeros.

The order of the additions is left to chance: that of a row's ids, and that of its pieces.

Slots are told as in ``slot_sums``; where the batch size varies by slot, a bag finds its own by
bisection of the slots' first bags.

Shape suffixes: N ids, S slots, B bags of all slots, U rows, M places of segments.
"""

import torch
import triton
import triton.language as tl

from fusedrec_torchrec.core.gpu.kernel import kernel
from fusedrec_torchrec.core.gpu.segments import FEW, PIECE, check_ids, most_pieces
from fusedrec_torchrec.core.gpu.slot_sums import _address, columns_of_program, stride_of, varies

__all__ = ["slot_row_sums"]

PLACED = 256  # ids of a program that writes to segments
MOST_IDS = 16  # of a bag at a time
WORKERS = 1024  # programs for pieces, at most


@triton.jit
def _slot_of_bag(bag, slots, batch, count, VARIABLE: tl.constexpr, STEPS: tl.constexpr):
    """Returns where the slots of bags are told: of several with the same first bag, the last."""
    if VARIABLE:
        slot = bag * 0
        for step in tl.static_range(STEPS):
            tried = slot + (1 << (STEPS - 1 - step))
            is_slot = tried < count
            first = tl.load(slots + 5 * tried + 3, mask=is_slot, other=0)
            slot = tl.where(is_slot & (first <= bag), tried, slot)
        told = slots + 5 * slot
    else:
        told = slots + 3 * (bag // batch)
    return told


@kernel(numbers="bags batch n", addresses="offsets weights row_of_piece")
def _place_bags(
    rows, ranks, segments, offsets, slots, addresses, weights,
    bag_of_place, weight_of_place, row_of_piece, out, bags, batch, count, n,
    PLAIN: tl.constexpr, WEIGHTED: tl.constexpr, VARIABLE: tl.constexpr, STEPS: tl.constexpr,
    PIECE: tl.constexpr, IDS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Writes the bag of each id to the segment of its row, and zeros to rows with pieces."""
    bag = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    live = bag < bags
    begin = tl.load(offsets + bag, mask=live, other=0).to(tl.int32)
    length = tl.load(offsets + bag + 1, mask=live, other=0).to(tl.int32) - begin
    for first in range(0, tl.max(length, 0), IDS):
        i = first + tl.arange(0, IDS)
        is_id = i[None, :] < length[:, None]
        at = begin[:, None] + i[None, :]
        row = tl.load(rows + at, mask=is_id, other=0)
        rank = tl.load(ranks + at, mask=is_id, other=0)
        start = tl.load(segments + 2 * row, mask=is_id, other=0)
        to = start + rank
        tl.store(bag_of_place + to, bag[:, None] + i[None, :] * 0, mask=is_id)
        if WEIGHTED:
            tl.store(weight_of_place + to, tl.load(weights + at, mask=is_id), mask=is_id)
        is_long = is_id & (start >= n)
        if tl.max(tl.max(is_long.to(tl.int32), 1), 0) > 0:
            in_pieces = to - n
            begins = is_long & (in_pieces % PIECE == 0)
            tl.store(row_of_piece + in_pieces // PIECE, row, mask=begins)
            is_first = is_long & (rank == 0)
            slot = _slot_of_bag(bag, slots, batch, count, VARIABLE, STEPS)
            dim = tl.load(slot, mask=live, other=0)
            address = row.to(tl.int64) * dim[:, None]
            if not PLAIN:
                address = tl.load(addresses + row, mask=is_first, other=0)
            for column in range(tl.max(dim, 0)):
                tl.store(out + address + column, 0.0, mask=is_first & (column < dim[:, None]))


@triton.jit
def _gradients(
    gradient, slots, offsets, bag_of_place, weight_of_place, at, is_id, d, dim,
    batch, count, stride, scale,
    WEIGHTED: tl.constexpr, VARIABLE: tl.constexpr, STEPS: tl.constexpr,
):  # fmt: skip
    """Returns what the bags of some places give to their rows."""
    bag = tl.load(bag_of_place + at, mask=is_id, other=0)
    slot = _slot_of_bag(bag, slots, batch, count, VARIABLE, STEPS)
    column = tl.multiple_of(tl.load(slot + 1, mask=is_id, other=0), [4])
    is_mean = is_id & (tl.load(slot + 2, mask=is_id, other=0) > 0)
    length = tl.load(offsets + bag + 1, mask=is_mean, other=1)
    length -= tl.load(offsets + bag, mask=is_mean, other=0)
    if VARIABLE:
        first = tl.load(slot + 3, mask=is_id, other=0)
        line = (bag - first) * tl.load(slot, mask=is_id, other=0) + column
    else:
        line = (bag % batch).to(tl.int64) * stride + column
    is_there = is_id[:, None] & (d[None, :] < dim)
    value = tl.load(gradient + line[:, None] + d[None, :], mask=is_there, other=0.0).to(tl.float32)
    value = tl.div_rn(value * scale, length.to(tl.float32)[:, None])
    if WEIGHTED:
        value *= tl.load(weight_of_place + at, mask=is_id, other=0.0)[:, None]
    return value


@kernel(numbers="rows n batch workers", addresses="offsets row_of_piece")
def _slot_row_sums(
    gradient, slots, offsets, bag_of_place, weight_of_place, segments, row_of_piece, cursors,
    addresses, out, rows, n, batch, count, stride, workers, scale,
    PLAIN: tl.constexpr, WEIGHTED: tl.constexpr, VARIABLE: tl.constexpr, STEPS: tl.constexpr,
    FEW: tl.constexpr, PIECE: tl.constexpr, BLOCK: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Sums up gradients, ``COLUMNS`` columns: the first programs pieces, the others whole rows."""
    d = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    program = tl.program_id(0)
    if program < workers:
        for piece in range(program, tl.load(cursors + 1), workers):
            row = tl.load(row_of_piece + piece)
            begin = n + piece * PIECE
            end = tl.load(segments + 2 * row) + tl.load(segments + 2 * row + 1)
            bag = tl.load(bag_of_place + begin)
            dim = tl.load(_slot_of_bag(bag, slots, batch, count, VARIABLE, STEPS))
            dim = tl.multiple_of(dim.to(tl.int32), 4)
            total = tl.zeros([BLOCK, COLUMNS], tl.float32)
            for first in range(0, PIECE, BLOCK):
                at = begin + first + tl.arange(0, BLOCK)
                total += _gradients(
                    gradient, slots, offsets, bag_of_place, weight_of_place,
                    at, at < tl.minimum(end, begin + PIECE), d, dim,
                    batch, count, stride, scale, WEIGHTED, VARIABLE, STEPS,
                )  # fmt: skip
            to = row.to(tl.int64) * dim
            if not PLAIN:
                to = tl.load(addresses + row)
            tl.atomic_add(out + to + d, tl.sum(total, 0), mask=d < dim, sem="relaxed")
    else:
        row = (program - workers) * BLOCK + tl.arange(0, BLOCK)
        live = row < rows
        start = tl.load(segments + 2 * row, mask=live, other=0)
        ids = tl.load(segments + 2 * row + 1, mask=live, other=0)
        live = live & (ids <= FEW)
        bag = tl.load(bag_of_place + start, mask=live, other=0)
        slot = _slot_of_bag(bag, slots, batch, count, VARIABLE, STEPS)
        wide_dim = tl.load(slot, mask=live, other=0)
        dim = tl.multiple_of(wide_dim.to(tl.int32), [4])
        total = tl.zeros([BLOCK, COLUMNS], tl.float32)
        for i in range(tl.max(tl.where(live, ids, 0), 0)):
            total += _gradients(
                gradient, slots, offsets, bag_of_place, weight_of_place,
                start + i, live & (i < ids), d, dim[:, None],
                batch, count, stride, scale, WEIGHTED, VARIABLE, STEPS,
            )  # fmt: skip
        # Not of the narrow one: Triton 3.7 cannot widen it again where the batch size varies.
        to = _address(row, addresses, wide_dim, PLAIN, live)
        mask = live[:, None] & (d[None, :] < dim[:, None])
        tl.store(out + to[:, None] + d[None, :], total, mask=mask)


def slot_row_sums(
    gradient: torch.Tensor,
    addresses: torch.Tensor | None,
    dims: list[int],
    slots_S3: torch.Tensor,
    rows_N: torch.Tensor,
    offsets_B1: torch.Tensor,
    weights_N: torch.Tensor | None,
    ranks_N: torch.Tensor,
    segments_U2: torch.Tensor,
    cursors: torch.Tensor,
    batch: int,
    bags: int,
    rows: int,
    scale: float,
    out: torch.Tensor,
) -> None:
    """Sums up the gradients of bags for each of their rows, in float32.

    Args:
        gradient: of what ``slot_bag_sums`` has written.
        addresses, dims, slots_S3, rows_N, offsets_B1, weights_N: those of ``slot_bag_sums``.
        ranks_N, segments_U2, cursors: which ids a row has, as ``number_batch_rows`` has it.
        batch: bags of a slot, or the most that any has.
        bags: of all slots.
        rows: how many there are; every one has an id.
        scale: that gradients are multiplied by.
        out: the sums, where the rows are; whatever is there is overwritten.
    """
    slots, ids = slots_S3.size(0), rows_N.numel()
    check_ids(ids)
    if not bags or not rows:
        return
    pieces, weighted = most_pieces(ids), weights_N is not None
    variable, steps = varies(slots_S3), max((slots - 1).bit_length(), 1)
    numbers = torch.empty(ids + pieces * (PIECE + 1), dtype=torch.int32, device=rows_N.device)
    bag_M, row_of_piece = numbers.split([ids + pieces * PIECE, pieces])
    weight_M = torch.empty_like(bag_M, dtype=torch.float32) if weighted else None
    at_a_time = min(triton.next_power_of_2(max(ids // bags, 1)), MOST_IDS)
    block = PLACED // at_a_time
    _place_bags[(triton.cdiv(bags, block),)](
        rows_N, ranks_N, segments_U2, offsets_B1, slots_S3, addresses, weights_N,
        bag_M, weight_M, row_of_piece, out, bags, batch, slots, ids,
        PLAIN=addresses is None, WEIGHTED=weighted, VARIABLE=variable, STEPS=steps,
        PIECE=PIECE, IDS=at_a_time, BLOCK=block,
    )  # fmt: skip
    block, columns, tiles = columns_of_program(dims)
    if variable:  # leaves room in registers for the search of slots
        block = max(block // 2, 1)
    workers = min(pieces, WORKERS)
    _slot_row_sums[(workers + triton.cdiv(rows, block), tiles)](
        gradient, slots_S3, offsets_B1, bag_M, weight_M, segments_U2, row_of_piece, cursors,
        addresses, out, rows, ids, batch, slots, stride_of(gradient, slots_S3), workers, scale,
        PLAIN=addresses is None, WEIGHTED=weighted, VARIABLE=variable, STEPS=steps,
        FEW=FEW, PIECE=PIECE, BLOCK=block, COLUMNS=columns,
    )  # fmt: skip
