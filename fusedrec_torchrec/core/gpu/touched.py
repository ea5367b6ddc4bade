"""Rows that replicas have used: lists, their union, and the means that they get, on CUDA.

Every row has a flag.  Flags that are set are listed in ascending order by two launches: programs
count those of their share of the rows, and then each knows where its own begin.  A message is

    [ rows listed up to the end of each block | row numbers ... ]

so that the last number of its header is how many there are.

Shape suffixes: B blocks, W replicas, R rows in a list, D columns of a row.
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from fusedrec_torchrec.core.gpu.kernel import kernel

__all__ = ["list_flags", "list_touched", "unite_touched", "write_means"]

BLOCK = 1024
MARKED = 512  # numbers of a program that sets flags
MOST_PROGRAMS = 1024  # that count: each of them reads what the others have counted
ELEMENTS = 1024  # of the means that a program has in hand


@kernel(numbers="size", addresses="numbers")
def _mark(numbers, flags, size, first_row, BLOCK: tl.constexpr):
    """Sets the flags of rows, numbered from ``first_row`` on."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    row = tl.load(numbers + at, mask=at < size, other=0).to(tl.int64) + first_row
    tl.store(flags + row, (at * 0 + 1).to(tl.uint8), mask=at < size)


@kernel(numbers="width", addresses="messages")
def _mark_messages(
    messages, flags, headers, width, blocks, HEADER: tl.constexpr, BLOCK: tl.constexpr
):
    """Sets the flags of all rows of a replica's message, ``program_id(1)``, as far as it has room.

    The first program of each also brings its header to where the host reads it.
    """
    replica = tl.program_id(1)
    message = messages + replica.to(tl.int64) * width
    if tl.program_id(0) == 0:
        b = tl.arange(0, HEADER)
        words = tl.load(message + b, mask=b < blocks, other=0)
        tl.store(headers + replica * blocks + b, words, mask=b < blocks)
    size = tl.minimum(tl.load(message + blocks - 1), width - blocks)
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    row = tl.load(message + blocks + at, mask=at < size, other=0)
    tl.store(flags + row, (at * 0 + 1).to(tl.uint8), mask=at < size)


@kernel()
def _count_flags(flags, counts, rows, share, BLOCK: tl.constexpr):
    """Counts the flags of a program's share of the rows."""
    first = tl.program_id(0).to(tl.int64) * share
    total = tl.zeros([BLOCK], tl.int32)
    for step in range(0, share, BLOCK):
        row = first + step + tl.arange(0, BLOCK)
        total += tl.load(flags + row, mask=row < rows, other=0).to(tl.int32)
    tl.store(counts + tl.program_id(0), tl.sum(total, 0))


@kernel(numbers="room")
def _list_flags(
    flags, counts, ends, header, out, rows, share, blocks, room,
    PROGRAMS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Lists the rows of a program's share whose flags are set, and counts up to ends of blocks."""
    program = tl.arange(0, PROGRAMS)
    is_before = program < tl.program_id(0)
    before = tl.sum(tl.load(counts + program, mask=is_before, other=0), 0)
    first = tl.program_id(0).to(tl.int64) * share
    for step in range(0, share, BLOCK):
        begin = first + step
        row = begin + tl.arange(0, BLOCK)
        flag = tl.load(flags + row, mask=row < rows, other=0).to(tl.int32)
        to = before + tl.cumsum(flag, 0) - flag
        tl.store(out + to, row.to(tl.int32), mask=(flag > 0) & (to < room))
        for b in range(blocks):
            end = tl.load(ends + b)
            if (end > begin) & (end <= begin + BLOCK):
                up_to_end = before + tl.sum(tl.where(row < end, flag, 0), 0)
                tl.store(header + b, up_to_end)
        before += tl.sum(flag, 0)


@kernel(numbers="size", addresses="sums rows")
def _write_means(
    sums, rows, target, size, first_row, replicas, dim, BLOCK: tl.constexpr, COLUMNS: tl.constexpr
):
    """Writes sums of rows, divided by the number of replicas, into a table."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    d = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    row = tl.load(rows + at, mask=at < size, other=0).to(tl.int64) - first_row
    is_there = (at < size)[:, None] & (d[None, :] < dim)
    total = tl.load(sums + at[:, None] * dim + d[None, :], mask=is_there, other=0.0)
    mean = tl.div_rn(total.to(tl.float32), (at * 0 + replicas).to(tl.float32)[:, None])
    line = target + row[:, None] * dim
    tl.store(line + d[None, :], mean.to(target.dtype.element_ty), mask=is_there)


def list_flags(flags: torch.Tensor, ends_B: torch.Tensor) -> torch.Tensor:
    """Returns a message of the rows whose flags are set, with room for all.

    Args:
        flags: of each row, bool.
        ends_B: the end of each block of rows.
    """
    blocks = ends_B.numel()
    message = torch.empty(blocks + flags.numel(), dtype=torch.int32, device=flags.device)
    _list(flags.view(torch.uint8), ends_B, message[:blocks], message[blocks:])
    return message


def list_touched(
    numbers: Sequence[torch.Tensor],
    first_rows: Sequence[int],
    ends_B: torch.Tensor,
    rows: int,
    room: int,
) -> torch.Tensor:
    """Returns a message of rows, each once.

    Args:
        numbers: int32 or int64 row numbers, in any order; there may be several lists of them.
        first_rows: what is added to the numbers of each list.
        ends_B: the end of each block of rows.
        rows: of all blocks.
        room: numbers that the message has room for at least; there is always room for all.
    """
    blocks, most = ends_B.numel(), min(sum(n.numel() for n in numbers), rows)
    flags = torch.zeros(rows, dtype=torch.uint8, device=ends_B.device)
    message = torch.empty(blocks + max(room, most), dtype=torch.int32, device=ends_B.device)
    for of_list, first_row in zip(numbers, first_rows, strict=True):
        if of_list.numel():
            _mark[(triton.cdiv(of_list.numel(), MARKED),)](
                of_list, flags, of_list.numel(), first_row, BLOCK=MARKED
            )
    _list(flags, ends_B, message[:blocks], message[blocks:])
    return message


def unite_touched(
    messages_W: torch.Tensor, ends_B: torch.Tensor, rows: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the rows of all messages, each once.

    Args:
        messages_W: of each replica, with as many row numbers as there is room for.
        ends_B: the end of each block of rows.
        rows: of all blocks.

    Returns:
        headers of all messages, and behind them that of the union; and its rows, of which the
        header tells how many there are.
    """
    (replicas, width), blocks = messages_W.shape, ends_B.numel()
    flags = torch.zeros(rows, dtype=torch.uint8, device=ends_B.device)
    headers = messages_W.new_empty((replicas + 1) * blocks)
    union_R = messages_W.new_empty(min(replicas * (width - blocks), rows))
    programs = max(triton.cdiv(width - blocks, MARKED), 1)
    _mark_messages[(programs, replicas)](
        messages_W, flags, headers, width, blocks,
        HEADER=triton.next_power_of_2(blocks), BLOCK=MARKED,
    )  # fmt: skip
    _list(flags, ends_B, headers[replicas * blocks :], union_R)
    return headers, union_R


def _list(
    flags: torch.Tensor, ends_B: torch.Tensor, header_B: torch.Tensor, out: torch.Tensor
) -> None:
    """Lists flags that are set, and counts them up to the end of each block."""
    rows = flags.numel()
    share = triton.cdiv(triton.cdiv(rows, BLOCK), MOST_PROGRAMS) * BLOCK
    programs = triton.cdiv(rows, share)
    counts = torch.empty(programs, dtype=torch.int32, device=flags.device)
    _count_flags[(programs,)](flags, counts, rows, share, BLOCK=BLOCK)
    _list_flags[(programs,)](
        flags, counts, ends_B, header_B, out, rows, share, ends_B.numel(), out.numel(),
        PROGRAMS=triton.next_power_of_2(programs), BLOCK=BLOCK,
    )  # fmt: skip


def write_means(
    sums_RD: torch.Tensor,
    rows_R: torch.Tensor,
    first_row: int,
    replicas: int,
    table: torch.Tensor,
) -> None:
    """Writes sums over replicas, divided by their number, into rows of a table.

    Args:
        sums_RD: of each row.
        rows_R: which rows these are, each once.
        first_row: the number of the table's first row.
        replicas: how many there are.
        table: [rows, columns].
    """
    size, dim = sums_RD.shape
    if not size:
        return
    columns = min(triton.next_power_of_2(dim), 128)
    block = max(ELEMENTS // columns, 1)
    _write_means[(triton.cdiv(size, block), triton.cdiv(dim, columns))](
        sums_RD, rows_R, table, size, first_row, replicas, dim, BLOCK=block, COLUMNS=columns
    )
