"""The codecs ``fp32``, ``fp16`` and ``bf16``, which send each number in a format of its own."""

from collections.abc import Sequence

import torch

from fusedrec_torchrec.codecs.codec import Codec, Entries, as_bytes, as_numbers
from fusedrec_torchrec.core.max_abs import max_abs
from fusedrec_torchrec.core.transfer import to_device

__all__ = ["EntryCodec", "NumberCodec", "power_of_two", "rows_of_scales"]

DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
SCALE = torch.float32


def power_of_two(numbers: torch.Tensor, exponent: int) -> torch.Tensor:
    """Returns the largest power of two whose product with all the numbers is below 2**exponent.

    It is a 0-dim tensor, made without waiting for a device; NaN if not all of them are finite.
    """
    if not numbers.numel():
        return numbers.new_ones((), dtype=SCALE)
    largest = max_abs(numbers).to(SCALE)
    shift = (exponent - torch.frexp(largest).exponent).clamp(max=126)
    scale = torch.ldexp(torch.ones_like(largest), shift)
    return torch.where(torch.isfinite(largest), scale, torch.nan)


def rows_of_scales(stream: torch.Tensor, counts: Sequence[int]) -> torch.Tensor:
    """Returns the scale that each row was sent with, [R, 1]."""
    scales_W = as_numbers(stream, SCALE)
    ranks = to_device(counts, scales_W.device)
    return scales_W.repeat_interleave(ranks, output_size=sum(counts))[:, None]


class NumberCodec(Codec):
    """Sends each number as fp32, fp16 or bf16.

    With ``auto_scale`` numbers are multiplied with a power of two that brings the largest of them
    near the end of fp16's range, so that neither large ones overflow nor small ones vanish: what
    loss scaling is for, without a number to choose.  It travels beside them, once for each rank.

    Args:
        dim: numbers of a row.
        dtype: in which they travel.
        scale: a constant that they are multiplied with.
        auto_scale: whether to find the scale anew in each step.
    """

    def __init__(
        self, dim: int, dtype: torch.dtype, scale: float | None = None, auto_scale: bool = False
    ) -> None:
        self._dim = dim
        self._dtype = dtype
        self._scale = scale
        self._auto_scale = auto_scale

    @staticmethod
    def of(kind: str, dim: int, loss_scale: float | None = None) -> "NumberCodec":
        """Returns the codec with this name."""
        auto = kind == "fp16" and loss_scale is None
        return NumberCodec(dim, DTYPES[kind], loss_scale, auto)

    @property
    def as_kernel(self) -> tuple[str, float] | None:
        name = next(name for name, dtype in DTYPES.items() if dtype == self._dtype)
        return name, -1.0 if self._auto_scale else self._scale or 0.0

    @property
    def encodes_rows_apart(self) -> bool:
        return not self._auto_scale

    def sizes(self, counts: Sequence[int]) -> list[list[int]]:
        numbers = [n * self._dim * self._dtype.itemsize for n in counts]
        return [numbers, [SCALE.itemsize] * len(counts)] if self._auto_scale else [numbers]

    def encode(
        self,
        rows_RD: torch.Tensor,
        counts: Sequence[int],
        training: bool,
        entries: Entries | None = None,
    ) -> tuple[list[torch.Tensor], Entries | None]:
        if self._auto_scale:
            fitting = power_of_two(rows_RD, 15)
            scale = torch.where(torch.isfinite(fitting), fitting, 1.0)  # they stay what they are
            halves = (rows_RD * scale).to(self._dtype)
            return [as_bytes(halves), as_bytes(scale.repeat(len(counts)))], None
        if self._scale is not None:
            rows_RD = rows_RD * self._scale
            largest = torch.finfo(self._dtype).max
            rows_RD = rows_RD.clamp_(-largest, largest)
        return [as_bytes(rows_RD.to(self._dtype))], None

    def decode(
        self,
        streams: Sequence[torch.Tensor],
        counts: Sequence[int],
        out_RD: torch.Tensor,
        entries: Entries | None = None,
    ) -> Entries | None:
        out_RD.copy_(as_numbers(streams[0], self._dtype).view(-1, self._dim))
        if self._auto_scale:
            out_RD.div_(rows_of_scales(streams[1], counts))
        elif self._scale is not None:
            out_RD.div_(self._scale)
        return None


class EntryCodec(Codec):
    """Sends the gradients of the entries that had travelled forward, in a format of their own.

    Args:
        numbers: the codec of the single entries.
        room: how many entries there is room for.
    """

    def __init__(self, numbers: NumberCodec, room: "Room") -> None:
        self._numbers = numbers
        self._room = room

    def sizes(self, counts: Sequence[int]) -> list[list[int]]:
        return self._numbers.sizes([self._room(n) for n in counts])

    def encode(
        self,
        rows_RD: torch.Tensor,
        counts: Sequence[int],
        training: bool,
        entries: Entries | None = None,
    ) -> tuple[list[torch.Tensor], Entries | None]:
        assert entries is not None
        values_E = entries.take(rows_RD)[:, None]
        return self._numbers.encode(values_E, [self._room(n) for n in counts], training)

    def decode(
        self,
        streams: Sequence[torch.Tensor],
        counts: Sequence[int],
        out_RD: torch.Tensor,
        entries: Entries | None = None,
    ) -> Entries | None:
        assert entries is not None
        if self._numbers.as_kernel == ("fp32", 0.0) and out_RD.dtype == torch.float32:
            entries.put(as_numbers(streams[0], torch.float32), out_RD)
            return entries
        values_E1 = out_RD.new_empty(entries.positions_E.numel(), 1)
        self._numbers.decode(streams, [self._room(n) for n in counts], values_E1)
        entries.put(values_E1.view(-1), out_RD)
        return entries


class Room:
    """Says how many entries a message of so many rows has room for.

    It is a little more than the wanted share: rows differ, and the threshold is from a sample.

    Args:
        dim: entries of a row.
        density: share that is wanted.
    """

    SLACK = 1 / 16

    def __init__(self, dim: int, density: float) -> None:
        self._dim = dim
        self._share = min(density * (1 + self.SLACK), 1.0)

    def __call__(self, rows: int) -> int:
        return min(int(rows * self._dim * self._share) + (rows > 0), rows * self._dim)

    @property
    def per_row(self) -> float:
        """Entries for each row, of many rows."""
        return self._dim * self._share
