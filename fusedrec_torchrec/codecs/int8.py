"""The codec ``int8``: rows as bytes with a scale and a bias each (FBGEMM's quantization)."""

from collections.abc import Sequence

import torch

from fusedrec_torchrec.codecs.codec import Codec, Entries, as_bytes
from fusedrec_torchrec.codecs.numbers import SCALE, power_of_two, rows_of_scales

__all__ = ["Int8Codec"]

SCALE_AND_BIAS = 8


class Int8Codec(Codec):
    """Sends a byte for each number, and a scale and a bias for each row.

    A number is off by at most half of (largest - smallest) / 255 of its row.

    FBGEMM adds 1e-8 to the range of a row, which is as much as the range of many a gradient: so
    rows are multiplied with a power of two first.  It also makes numbers of NaN; here all rows
    of a bucket become NaN if one number is, so that it is seen.
    """

    def __init__(self, dim: int) -> None:
        self._dim = dim
        self._row_bytes = dim + SCALE_AND_BIAS

    @property
    def as_kernel(self) -> tuple[str, float] | None:
        return "int8", -1.0

    def sizes(self, counts: Sequence[int]) -> list[list[int]]:
        return [[n * self._row_bytes for n in counts], [SCALE.itemsize] * len(counts)]

    def encode(
        self,
        rows_RD: torch.Tensor,
        counts: Sequence[int],
        training: bool,
        entries: Entries | None = None,
    ) -> tuple[list[torch.Tensor], Entries | None]:
        scale = power_of_two(rows_RD, 15)
        quantized = torch.ops.fbgemm.FloatToFused8BitRowwiseQuantized(rows_RD * scale)
        return [as_bytes(quantized), as_bytes(scale.repeat(len(counts)))], None

    def decode(
        self,
        streams: Sequence[torch.Tensor],
        counts: Sequence[int],
        out_RD: torch.Tensor,
        entries: Entries | None = None,
    ) -> Entries | None:
        quantized = streams[0].view(-1, self._row_bytes)
        rows_RD = torch.ops.fbgemm.Fused8BitRowwiseQuantizedToFloat(quantized)
        torch.div(rows_RD, rows_of_scales(streams[1], counts), out=out_RD)
        return None
