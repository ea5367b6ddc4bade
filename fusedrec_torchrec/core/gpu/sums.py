"""Rows to sums of bags, and gradients of bags to sums of rows, on CUDA: ``sums.h`` on CPU.

Bags are read from and written to their columns of the output, so that there is one launch for each
bucket and direction.  Backward adds gradients to rows by atomic additions: a row that very many
bags have is not left to one program, but the order of the additions is left to chance.

Shape suffixes: N ids, B bags, D columns of a row.
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from fusedrec_torchrec.core.gpu.kernel import kernel
from fusedrec_torchrec.core.transfer import to_device

__all__ = ["bag_sums", "row_addresses", "row_sums"]

BLOCK = 512
ELEMENTS = 512  # of the rows that a program has in hand
MOST_IDS = 64  # of a bag for one program, backward


@triton.jit
def _address(row, addresses, dim, PLAIN: tl.constexpr, live):
    if PLAIN:  # noqa: SIM108 - Triton would compile both
        at = row.to(tl.int64) * dim
    else:
        at = tl.load(addresses + row, mask=live, other=0)
    return at


@kernel()
def _row_addresses(pieces, out, BLOCK: tl.constexpr):
    """Numbers of a piece, ``program_id(1)``, go up from its first one by steps of its dimension."""
    piece = pieces + 4 * tl.program_id(1)
    target, first = tl.load(piece), tl.load(piece + 1)
    dim, count = tl.load(piece + 2), tl.load(piece + 3)
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + target + at, first + at * dim, mask=at < count)


@kernel(numbers="bags num_rows", addresses="rows offsets weights divisor")
def _bag_sums(
    flat, addresses, rows, offsets, weights, divisor, out,
    bags, num_rows, dim, width, column, stride,
    PLAIN: tl.constexpr, BAGS: tl.constexpr, WEIGHTED: tl.constexpr, DIVIDED: tl.constexpr,
    BLOCK: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Sums up the rows of some bags, ``BLOCK`` of them, all columns at once.

    If every id is a bag, a row number that is the number of rows stands for no row at all.
    """
    bag = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    d = tl.arange(0, COLUMNS)
    live, has_column = bag < bags, d[None, :] < dim
    if BAGS:
        begin = tl.load(offsets + bag, mask=live, other=0)
        length = tl.load(offsets + bag + 1, mask=live, other=0) - begin
    else:
        begin = bag
        length = live.to(tl.int32)
    total = tl.zeros([BLOCK, COLUMNS], tl.float32)
    for i in range(tl.max(length, 0)):
        is_id = i < length
        row = tl.load(rows + begin + i, mask=is_id, other=0)
        is_id = is_id & (row < num_rows)
        at = _address(row, addresses, dim, PLAIN, is_id)
        is_there = is_id[:, None] & has_column
        values = tl.load(flat + at[:, None] + d[None, :], mask=is_there, other=0.0).to(tl.float32)
        if WEIGHTED:
            values *= tl.load(weights + begin + i, mask=is_id, other=0.0)[:, None]
        total += values
    if DIVIDED:
        total = tl.div_rn(total, tl.load(divisor + bag, mask=live, other=1.0)[:, None])
    to = bag // width * stride + column + bag % width * dim
    tl.store(
        out + to[:, None] + d[None, :],
        total.to(out.dtype.element_ty),
        mask=live[:, None] & has_column,
    )


@kernel(numbers="bags num_rows", addresses="rows offsets weights divisor")
def _row_sums(
    gradient, addresses, rows, offsets, weights, divisor, out,
    bags, num_rows, dim, width, column, stride, scale,
    PLAIN: tl.constexpr, BAGS: tl.constexpr, WEIGHTED: tl.constexpr, DIVIDED: tl.constexpr,
    BLOCK: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Adds gradients of some bags to those of their rows; ``program_id(1)`` shares long bags."""
    bag = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    d = tl.arange(0, COLUMNS)
    live, has_column = bag < bags, d[None, :] < dim
    at = bag // width * stride + column + bag % width * dim
    is_there = live[:, None] & has_column
    value = tl.load(gradient + at[:, None] + d[None, :], mask=is_there, other=0.0).to(tl.float32)
    value *= scale
    if DIVIDED:
        value = tl.div_rn(value, tl.load(divisor + bag, mask=live, other=1.0)[:, None])
    if BAGS:
        begin = tl.load(offsets + bag, mask=live, other=0)
        length = tl.load(offsets + bag + 1, mask=live, other=0) - begin
    else:
        begin = bag
        length = live.to(tl.int32)
    for i in range(tl.program_id(1), tl.max(length, 0), tl.num_programs(1)):
        is_id = i < length
        row = tl.load(rows + begin + i, mask=is_id, other=0)
        is_id = is_id & (row < num_rows)
        to = _address(row, addresses, dim, PLAIN, is_id)
        own = value
        if WEIGHTED:
            own = value * tl.load(weights + begin + i, mask=is_id, other=0.0)[:, None]
        tl.atomic_add(
            out + to[:, None] + d[None, :], own, mask=is_id[:, None] & has_column, sem="relaxed"
        )


def _shape(dim: int) -> tuple[int, int]:
    """Returns how many bags a program takes, and a power of two of columns."""
    columns = triton.next_power_of_2(dim)
    return max(ELEMENTS // columns, 1), columns


def row_addresses(
    like: torch.Tensor, counts_WK: Sequence[int], dims: Sequence[int]
) -> torch.Tensor:
    """Returns where rows lie in a flat buffer in the order (owner, bucket), bucket after bucket.

    Args:
        like: a tensor on the device.
        counts_WK: rows of each owner and bucket.
        dims: columns of each bucket.
    """
    buckets = len(dims)
    rows = [sum(counts_WK[k::buckets]) for k in range(buckets)]
    targets, first, pieces = [sum(rows[:k]) for k in range(buckets)], 0, []
    for piece, count in enumerate(counts_WK):
        k = piece % buckets
        pieces += [targets[k], first, dims[k], count]
        targets[k] += count
        first += count * dims[k]
    out = torch.empty(sum(rows), dtype=torch.int64, device=like.device)
    if out.numel():
        _row_addresses[(triton.cdiv(max(counts_WK), BLOCK), len(counts_WK))](
            to_device(pieces, like.device), out, BLOCK=BLOCK
        )
    return out


def bag_sums(
    flat: torch.Tensor,
    addresses: torch.Tensor | None,
    dim: int,
    rows_N: torch.Tensor,
    offsets_B1: torch.Tensor | None,
    weights_N: torch.Tensor | None,
    divisor_B: torch.Tensor | None,
    width: int,
    column: int,
    out: torch.Tensor,
) -> None:
    """Sums up rows of bags, and writes them to their columns; see ``sums.h``."""
    bags = out.size(0) * width
    if not bags:
        return
    block, columns = _shape(dim)
    _bag_sums[(triton.cdiv(bags, block),)](
        flat, addresses, rows_N, offsets_B1, weights_N, divisor_B, out,
        bags, _rows(flat, addresses, dim), dim, width, column, out.stride(0),
        PLAIN=addresses is None, BAGS=offsets_B1 is not None, WEIGHTED=weights_N is not None,
        DIVIDED=divisor_B is not None, BLOCK=block, COLUMNS=columns,
    )  # fmt: skip


def row_sums(
    gradient: torch.Tensor,
    width: int,
    column: int,
    rows_N: torch.Tensor,
    offsets_B1: torch.Tensor | None,
    weights_N: torch.Tensor | None,
    divisor_B: torch.Tensor | None,
    addresses: torch.Tensor | None,
    num_rows: int,
    dim: int,
    scale: float,
    out: torch.Tensor,
) -> None:
    """Adds gradients of bags to those of their rows; see ``sums.h``.  ``out`` must be zero."""
    bags = gradient.size(0) * width
    if not bags or not num_rows:
        return
    block, columns = _shape(dim)
    longest = triton.cdiv(rows_N.numel(), bags) if offsets_B1 is not None else 1
    shares = min(triton.cdiv(longest, MOST_IDS), 64)
    _row_sums[(triton.cdiv(bags, block), shares)](
        gradient, addresses, rows_N, offsets_B1, weights_N, divisor_B, out,
        bags, num_rows, dim, width, column, gradient.stride(0), scale,
        PLAIN=addresses is None, BAGS=offsets_B1 is not None, WEIGHTED=weights_N is not None,
        DIVIDED=divisor_B is not None, BLOCK=block, COLUMNS=columns,
    )  # fmt: skip


def _rows(flat: torch.Tensor, addresses: torch.Tensor | None, dim: int) -> int:
    return flat.numel() // dim if addresses is None else addresses.numel()
