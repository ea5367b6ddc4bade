"""Rows in other number formats, and back, on CUDA: the codecs fp32, fp16, bf16 and int8.

One launch encodes the rows of all buckets for all ranks into one message, and one decodes them;
where a scale has to be found first, there is one more.  Results are those of ``codecs``, bit for
bit.  A message is in the order (rank, bucket): numbers, then their scale if it was found here.

A piece is the rows of one rank and bucket.  Its places in rows and message are in units of four
numbers and four bytes, since dimensions are multiples of four.
"""

import struct
from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from fusedrec_torchrec.core.gpu import FORMATS
from fusedrec_torchrec.core.gpu.kernel import kernel
from fusedrec_torchrec.core.transfer import to_device

__all__ = ["decode_rows", "encode_rows"]

BLOCK = 1024
FIELDS = 7  # of a piece: source, target, rows, columns, format, scale and limit as bits
PER_PROGRAM = 8 * BLOCK  # numbers among which a program looks for the largest
MOST_PROGRAMS = 512
AUTO = -1  # in the place of the bits of a scale
SCALE_AND_BIAS = 8
SCALE = 4
INFINITY = float("inf")


@kernel()
def _largest(rows, pieces, largest, ranks, buckets, FIELDS: tl.constexpr, BLOCK: tl.constexpr):
    """Finds the largest magnitude of some numbers of a bucket, as bits; -1 of no numbers."""
    bucket = tl.program_id(1)
    most = tl.full([BLOCK], -1, tl.int32)
    for rank in range(ranks):
        piece = pieces + FIELDS * (rank * buckets + bucket)
        source = 4 * tl.load(piece)
        size = tl.load(piece + 2) * tl.load(piece + 3)
        first = tl.program_id(0).to(tl.int64) * BLOCK
        while first < size:
            at = first + tl.arange(0, BLOCK)
            number = tl.load(rows + source + at, mask=at < size, other=0.0)
            bits = number.to(tl.int32, bitcast=True) & 0x7FFFFFFF
            most = tl.maximum(most, tl.where(at < size, bits, -1))
            first += tl.num_programs(0).to(tl.int64) * BLOCK
    tl.store(largest + bucket * tl.num_programs(0) + tl.program_id(0), tl.max(most, 0))


@triton.jit
def _power_of_two(largest, programs, PROGRAMS: tl.constexpr):
    """Returns what ``codecs.numbers.power_of_two`` does; infinity where that is NaN."""
    program = tl.arange(0, PROGRAMS)
    bits = tl.max(tl.load(largest + program, mask=program < programs, other=-1), 0)
    shift = tl.minimum(15 + 126 - (bits >> 23), 126)
    shift = tl.where(bits == 0, 15, shift)  # frexp has an exponent of 0 for it
    shift = tl.where(bits < 0, 0, shift)
    shift = tl.where(bits >= 0x7F800000, 128, shift)
    return ((shift + 127) << 23).to(tl.float32, bitcast=True)


@triton.jit
def _nearest(number):
    """Rounds numbers of [0, 2**22) to whole ones, halves to even ones."""
    return (number + 8388608.0) - 8388608.0


@triton.jit
def _to_bf16(number):
    """Returns the bits of the nearest bf16."""
    bits = number.to(tl.int32, bitcast=True)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return tl.where(number != number, 0x7FC0, rounded)


@kernel(numbers="programs")
def _encode(
    rows, pieces, largest, wire, programs, buckets,
    WIDE: tl.constexpr, NARROW: tl.constexpr, BYTES: tl.constexpr,
    FIELDS: tl.constexpr, PROGRAMS: tl.constexpr, BLOCK: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Encodes a block of the rows of a piece, ``program_id(1)``; the first one writes the scale."""
    piece = pieces + FIELDS * tl.program_id(1)
    source, target = 4 * tl.load(piece), 4 * tl.load(piece + 1)
    count, dim, form = tl.load(piece + 2), tl.load(piece + 3), tl.load(piece + 4)
    constant = tl.load(piece + 5).to(tl.int32)
    limit = tl.load(piece + 6).to(tl.int32).to(tl.float32, bitcast=True)
    scale = constant.to(tl.float32, bitcast=True)
    size = count * dim
    block = tl.program_id(0).to(tl.int64)
    if PROGRAMS:  # noqa: SIM102 - decided when it is compiled
        if constant == -1:
            scale = _power_of_two(
                largest + tl.program_id(1) % buckets * programs, programs, PROGRAMS
            )
            if form == 3:  # so that all rows are seen to be wrong
                scale = tl.where(scale == float("inf"), float("nan"), scale)
                behind = target + count * (dim + 8)
            else:  # they stay what they are
                scale = tl.where(scale == float("inf"), 1.0, scale)
                behind = target + 2 * size
            if block == 0:
                tl.store((wire + behind).to(tl.pointer_type(tl.float32)), scale)
    at = block * BLOCK + tl.arange(0, BLOCK)
    if WIDE:  # noqa: SIM102 - decided when it is compiled
        if form == 0:
            number = tl.load(rows + source + at, mask=at < size, other=0.0)
            tl.store((wire + target).to(tl.pointer_type(tl.float32)) + at, number, mask=at < size)
    if NARROW:  # noqa: SIM102 - decided when it is compiled
        if (form == 1) | (form == 2):
            number = tl.load(rows + source + at, mask=at < size, other=0.0) * scale
            number = tl.where(number > limit, limit, number)
            number = tl.where(number < -limit, -limit, number)
            half = number.to(tl.float16).to(tl.int16, bitcast=True)
            bits = tl.where(form == 1, half, _to_bf16(number).to(tl.int16))
            tl.store((wire + target).to(tl.pointer_type(tl.int16)) + at, bits, mask=at < size)
    if BYTES:  # noqa: SIM102 - decided when it is compiled
        if form == 3:
            row = block * (BLOCK // COLUMNS) + tl.arange(0, BLOCK // COLUMNS)
            d = tl.arange(0, COLUMNS)
            is_there = (row < count)[:, None] & (d < dim)[None, :]
            number = tl.load(
                rows + source + row[:, None] * dim + d[None, :], mask=is_there, other=0.0
            )
            number *= scale
            least = tl.min(tl.where(is_there, number, float("inf")), 1)
            most = tl.max(tl.where(is_there, number, -float("inf")), 1)
            reach = most - least
            unit = tl.div_rn(tl.full(reach.shape, 255.0, tl.float32), reach + 1e-8)
            byte = _nearest((number - least[:, None]) * unit[:, None]).to(tl.int32).to(tl.uint8)
            to = wire + target + row * (dim + 8)
            tl.store(to[:, None] + d[None, :], byte, mask=is_there)
            behind = (to + dim).to(tl.pointer_type(tl.float32))
            fraction = tl.div_rn(reach, tl.full(reach.shape, 255.0, tl.float32))
            tl.store(behind, fraction, mask=row < count)
            tl.store(behind + 1, least, mask=row < count)


@kernel()
def _decode(
    wire, pieces, out,
    WIDE: tl.constexpr, NARROW: tl.constexpr, BYTES: tl.constexpr,
    FIELDS: tl.constexpr, BLOCK: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Decodes a block of the rows of a piece, ``program_id(1)``."""
    piece = pieces + FIELDS * tl.program_id(1)
    target, source = 4 * tl.load(piece), 4 * tl.load(piece + 1)
    count, dim, form = tl.load(piece + 2), tl.load(piece + 3), tl.load(piece + 4)
    constant = tl.load(piece + 5).to(tl.int32)
    scale = constant.to(tl.float32, bitcast=True)
    size = count * dim
    block = tl.program_id(0).to(tl.int64)
    at = block * BLOCK + tl.arange(0, BLOCK)
    if WIDE:  # noqa: SIM102 - decided when it is compiled
        if form == 0:
            number = tl.load(
                (wire + source).to(tl.pointer_type(tl.float32)) + at, mask=at < size, other=0.0
            )
            tl.store(out + target + at, number, mask=at < size)
    if NARROW:  # noqa: SIM102 - decided when it is compiled
        if (form == 1) | (form == 2):
            if constant == -1:
                scale = tl.load((wire + source + 2 * size).to(tl.pointer_type(tl.float32)))
            bits = tl.load(
                (wire + source).to(tl.pointer_type(tl.int16)) + at, mask=at < size, other=0
            )
            half = bits.to(tl.float16, bitcast=True).to(tl.float32)
            number = (bits.to(tl.int32) << 16).to(tl.float32, bitcast=True)
            number = tl.where(form == 1, half, number)
            tl.store(
                out + target + at, tl.div_rn(number, scale + tl.zeros_like(number)), mask=at < size
            )
    if BYTES:  # noqa: SIM102 - decided when it is compiled
        if form == 3:
            row = block * (BLOCK // COLUMNS) + tl.arange(0, BLOCK // COLUMNS)
            d = tl.arange(0, COLUMNS)
            is_there = (row < count)[:, None] & (d < dim)[None, :]
            begin = wire + source + row * (dim + 8)
            behind = (begin + dim).to(tl.pointer_type(tl.float32))
            fraction = tl.load(behind, mask=row < count, other=0.0)[:, None]
            least = tl.load(behind + 1, mask=row < count, other=0.0)[:, None]
            scale = tl.load((wire + source + count * (dim + 8)).to(tl.pointer_type(tl.float32)))
            byte = tl.load(begin[:, None] + d[None, :], mask=is_there, other=0).to(tl.float32)
            zeros = tl.zeros_like(byte)
            number = tl.fma(byte, fraction + zeros, least + zeros)
            to = out + target + row[:, None] * dim + d[None, :]
            tl.store(to, tl.div_rn(number, scale + zeros), mask=is_there)


def _bits(number: float) -> int:
    return int(struct.unpack("i", struct.pack("f", number))[0])


class _Layout:
    """Where the pieces of rows and of a message are.

    Args:
        counts_WK: rows of each rank and bucket.
        dims: columns of each bucket, multiples of four.
        formats: of each bucket, by their number in ``FORMATS``.
        scales: of each bucket; 0 for none, less if it is to be found.
    """

    def __init__(
        self,
        counts_WK: Sequence[int],
        dims: Sequence[int],
        formats: Sequence[int],
        scales: Sequence[float],
    ) -> None:
        kinds = [FORMATS[form] for form in formats]
        limits = {"fp16": torch.finfo(torch.float16).max, "bf16": torch.finfo(torch.bfloat16).max}
        self.is_auto = [scale < 0 for scale in scales]
        self.bytes = self.elements = 0
        self.pieces: list[int] = []
        widest = max(
            (dim for dim, kind in zip(dims, kinds, strict=True) if kind == "int8"), default=1
        )
        columns = triton.next_power_of_2(widest)
        block = max(BLOCK, columns)
        self.blocks = 1
        for i, count in enumerate(counts_WK):
            k = i % len(dims)
            dim, kind, scale = dims[k], kinds[k], scales[k]
            bits = AUTO if scale < 0 else _bits(scale if scale else 1.0)
            limit = limits[kind] if scale > 0 else INFINITY
            self.pieces += [
                self.elements // 4, self.bytes // 4, count, dim, formats[k], bits, _bits(limit)
            ]  # fmt: skip
            self.elements += count * dim
            row_bytes = (
                dim + SCALE_AND_BIAS if kind == "int8" else dim * (4 if kind == "fp32" else 2)
            )
            self.bytes += count * row_bytes + (SCALE if scale < 0 else 0)
            own = (
                triton.cdiv(count, block // columns)
                if kind == "int8"
                else triton.cdiv(count * dim, block)
            )
            self.blocks = max(self.blocks, own)
        self.constants = {
            "WIDE": "fp32" in kinds,
            "NARROW": "fp16" in kinds or "bf16" in kinds,
            "BYTES": "int8" in kinds,
            "FIELDS": FIELDS,
            "BLOCK": block,
            "COLUMNS": columns,
        }


def encode_rows(
    flat: torch.Tensor,
    counts_WK: Sequence[int],
    dims: Sequence[int],
    formats: Sequence[int],
    scales: Sequence[float],
) -> torch.Tensor:
    """Returns rows in the order (rank, bucket) as the bytes of a message.

    Args:
        flat: float32, contiguous.
        counts_WK: rows of each rank and bucket.
        dims: columns of each bucket, multiples of four.
        formats: of each bucket, by their number in ``FORMATS``.
        scales: of each bucket, what numbers are multiplied with; 0 for nothing, less for the power
            of two that fits, which int8 must have.
    """
    layout = _Layout(counts_WK, dims, formats, scales)
    wire = torch.empty(layout.bytes, dtype=torch.uint8, device=flat.device)
    if not layout.bytes:
        return wire
    ranks, buckets = len(counts_WK) // len(dims), len(dims)
    pieces = to_device(layout.pieces, flat.device)
    largest, programs, most = wire, 0, 0
    if any(layout.is_auto):
        programs = min(max(triton.cdiv(flat.numel(), PER_PROGRAM), 1), MOST_PROGRAMS)
        most = MOST_PROGRAMS
        largest = torch.empty(buckets * programs, dtype=torch.int32, device=flat.device)
        _largest[(programs, buckets)](
            flat, pieces, largest, ranks, buckets, FIELDS=FIELDS, BLOCK=BLOCK
        )
    _encode[(layout.blocks, ranks * buckets)](
        flat, pieces, largest, wire, programs, buckets, PROGRAMS=most, **layout.constants,
        enable_fp_fusion=False,
    )  # fmt: skip
    return wire


def decode_rows(
    wire: torch.Tensor,
    counts_WK: Sequence[int],
    dims: Sequence[int],
    formats: Sequence[int],
    scales: Sequence[float],
    out: torch.Tensor,
) -> None:
    """Writes the rows of a message to ``out``, in the order (rank, bucket); see ``encode_rows``."""
    layout = _Layout(counts_WK, dims, formats, scales)
    if layout.elements:
        _decode[(layout.blocks, len(counts_WK))](
            wire, to_device(layout.pieces, wire.device), out, **layout.constants,
            enable_fp_fusion=False,
        )  # fmt: skip
