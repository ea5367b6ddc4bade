"""Rows to sums of bags for all slots of a batch at once, on CUDA; the way back: ``row_gradients``.

A slot's bags stay where the batch has them, slot after slot, and go to the slot's columns of the
output; rows are numbered over all buckets.  So there is one launch, whatever the number of tables,
dimensions and poolings.

A slot is told by its dimension, its first column in the output and whether it takes means.  Where
the batch size varies by slot, its bags are lines of its own, one behind another: then also by its
first bag and its number of bags, and its first column is that of the whole output in one line.

Shape suffixes: N ids, S slots, B bags of all slots, D columns of a row.
"""

import torch
import triton
import triton.language as tl

from fusedrec_torchrec.core.gpu.kernel import kernel

__all__ = ["columns_of_program", "slot_bag_sums", "slot_weight_sums", "stride_of", "varies"]

ELEMENTS = 512  # of the rows that a program has in hand
PRODUCTS = 256  # of gradients and rows that a program has in hand
MOST_BAGS = 16  # of a program: with more, registers are spilled
MIXED_COLUMNS = 32  # of a program if dimensions differ: a cache line
FIELDS, VARIABLE_FIELDS = 3, 5  # numbers that tell a slot


@triton.jit
def _bags_of(
    slots, offsets, batch, stride, first_column,
    VARIABLE: tl.constexpr, BLOCK: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Returns the bags of a program, ``BLOCK`` samples of the slot ``program_id(1)``.

    They have no ids if the slot has no such columns.
    """
    slot = slots + tl.program_id(1) * (5 if VARIABLE else 3)
    dim = tl.multiple_of(tl.load(slot), 4)
    column = tl.multiple_of(tl.load(slot + 1), 4)
    sample = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    if VARIABLE:
        bag = tl.load(slot + 3) + sample
        live = (sample < tl.load(slot + 4)) & (first_column < dim)
        line = sample * dim
    else:
        bag = tl.program_id(1).to(tl.int64) * batch + sample
        live = (sample < batch) & (first_column < dim)
        line = sample * stride
    begin = tl.load(offsets + bag, mask=live, other=0).to(tl.int32)
    length = tl.load(offsets + bag + 1, mask=live, other=0).to(tl.int32) - begin
    divisor = tl.where(tl.load(slot + 2) > 0, tl.maximum(length, 1), 1).to(tl.float32)
    d = first_column + tl.arange(0, COLUMNS)
    is_there = live[:, None] & (d[None, :] < dim)
    return line, column + d, d, dim, is_there, begin, length, divisor


@triton.jit
def _address(row, addresses, dim, PLAIN: tl.constexpr, live):
    if PLAIN:  # noqa: SIM108 - Triton would compile both
        at = row.to(tl.int64) * dim
    else:
        at = tl.load(addresses + row, mask=live, other=0)
    return tl.multiple_of(at, [4])


@kernel(numbers="batch", addresses="rows offsets weights")
def _slot_bag_sums(
    flat, addresses, slots, rows, offsets, weights, out, batch, stride,
    PLAIN: tl.constexpr, WEIGHTED: tl.constexpr, VARIABLE: tl.constexpr,
    BLOCK: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Sums up the rows of some bags of a slot, ``COLUMNS`` of their columns."""
    line, to, d, dim, is_there, begin, length, divisor = _bags_of(
        slots, offsets, batch, stride, tl.program_id(2) * COLUMNS, VARIABLE, BLOCK, COLUMNS
    )
    total = tl.zeros([BLOCK, COLUMNS], tl.float32)
    for i in range(tl.max(length, 0)):
        is_id = i < length
        row = tl.load(rows + begin + i, mask=is_id, other=0)
        at = _address(row, addresses, dim, PLAIN, is_id)
        values = tl.load(
            flat + at[:, None] + d[None, :], mask=is_id[:, None] & is_there, other=0.0
        ).to(tl.float32)
        if WEIGHTED:
            values *= tl.load(weights + begin + i, mask=is_id, other=0.0)[:, None]
        total += values
    total = tl.div_rn(total, divisor[:, None])
    tl.store(out + line[:, None] + to[None, :], total.to(out.dtype.element_ty), mask=is_there)


@kernel(numbers="batch", addresses="rows offsets")
def _slot_weight_sums(
    gradient, flat, addresses, slots, rows, offsets, out, batch, stride,
    PLAIN: tl.constexpr, VARIABLE: tl.constexpr, TILES: tl.constexpr,
    BLOCK: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Multiplies the gradients of some bags of a slot with their rows: gradients of weights."""
    line, from_, d, dim, _, begin, length, divisor = _bags_of(
        slots, offsets, batch, stride, 0, VARIABLE, BLOCK, COLUMNS
    )
    for i in range(tl.max(length, 0)):
        is_id = i < length
        row = tl.load(rows + begin + i, mask=is_id, other=0)
        at = _address(row, addresses, dim, PLAIN, is_id)
        total = tl.zeros([BLOCK], tl.float32)
        for tile in range(TILES):
            first = tile * COLUMNS
            is_value = is_id[:, None] & (first + d[None, :] < dim)
            from_row = first + at[:, None] + d[None, :]
            from_line = first + line[:, None] + from_[None, :]
            values = tl.load(flat + from_row, mask=is_value, other=0.0).to(tl.float32)
            values *= tl.load(gradient + from_line, mask=is_value, other=0.0).to(tl.float32)
            total += tl.sum(values, 1)
        tl.store(out + begin + i, tl.div_rn(total, divisor), mask=is_id)


def columns_of_program(dims: list[int]) -> tuple[int, int, int]:
    """Returns how many samples and columns a program takes, and how often there are as many."""
    most = max(dims)
    columns = triton.next_power_of_2(most)
    if len(set(dims)) > 1:
        columns = min(columns, MIXED_COLUMNS)
    bags = min(max(ELEMENTS // columns, 1), MOST_BAGS)
    return bags, columns, triton.cdiv(most, columns)


def slot_bag_sums(
    flat: torch.Tensor,
    addresses: torch.Tensor | None,
    dims: list[int],
    slots_S3: torch.Tensor,
    rows_N: torch.Tensor,
    offsets_B1: torch.Tensor,
    weights_N: torch.Tensor | None,
    batch: int,
    out: torch.Tensor,
) -> None:
    """Sums up rows of bags, and writes them to the columns of their slots.

    Args:
        flat: the rows.
        addresses: where each begins; None if they lie one after another.
        dims: of the buckets that slots are of.
        slots_S3: for each slot its dimension, its first column, and whether it takes means; if the
            batch size varies also its first bag and how many it has.
        rows_N: the row of each id, slot after slot.
        offsets_B1: where bags begin among these.
        weights_N: of the ids; None if all count once.
        batch: bags of a slot, or the most that any has.
        out: a line for each sample; if the batch size varies, one line.
    """
    slots = slots_S3.size(0)
    if not batch or not slots:
        return
    block, columns, tiles = columns_of_program(dims)
    _slot_bag_sums[(triton.cdiv(batch, block), slots, tiles)](
        flat, addresses, slots_S3, rows_N, offsets_B1, weights_N, out, batch,
        stride_of(out, slots_S3),
        PLAIN=addresses is None, WEIGHTED=weights_N is not None, VARIABLE=varies(slots_S3),
        BLOCK=block, COLUMNS=columns,
    )  # fmt: skip


def slot_weight_sums(
    gradient: torch.Tensor,
    flat: torch.Tensor,
    addresses: torch.Tensor | None,
    dims: list[int],
    slots_S3: torch.Tensor,
    rows_N: torch.Tensor,
    offsets_B1: torch.Tensor,
    batch: int,
    out_N: torch.Tensor,
) -> None:
    """Writes gradients of the weights of ids; those of ids that no bag has are left alone.

    Args:
        gradient: of what ``slot_bag_sums`` has written.
        out_N: float32, for each id.

    The others are those of ``slot_bag_sums``.
    """
    slots = slots_S3.size(0)
    if not batch or not slots or not out_N.numel():
        return
    columns = min(triton.next_power_of_2(max(dims)), MIXED_COLUMNS)
    block = min(PRODUCTS // columns, MOST_BAGS)
    _slot_weight_sums[(triton.cdiv(batch, block), slots)](
        gradient, flat, addresses, slots_S3, rows_N, offsets_B1, out_N, batch,
        stride_of(gradient, slots_S3),
        PLAIN=addresses is None, VARIABLE=varies(slots_S3),
        TILES=triton.cdiv(max(dims), columns), BLOCK=block, COLUMNS=columns,
    )  # fmt: skip


def varies(slots: torch.Tensor) -> bool:
    """Tells whether slots are those of a batch whose size varies by slot."""
    return slots.size(1) == VARIABLE_FIELDS


def stride_of(lines: torch.Tensor, slots: torch.Tensor) -> int:
    """Returns the elements from a sample to the next; none if the batch size varies by slot.

    There is one line then, whose size would have kernels compiled anew.
    """
    return 0 if varies(slots) else lines.stride(0)
