"""The rows of all buckets, through their codecs, in one buffer of bytes.

Buffers are in the order (rank, bucket, stream), so that one all-to-all moves them.
"""

import logging
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch

from fusedrec_torchrec.codecs.codec import Codec, Entries
from fusedrec_torchrec.codecs.foreign import ForeignCodec
from fusedrec_torchrec.codecs.int8 import Int8
from fusedrec_torchrec.codecs.largest import MOST_COLUMNS, LargestEntries
from fusedrec_torchrec.codecs.numbers import EntryNumbers, Numbers
from fusedrec_torchrec.codecs.options import DENSITY, EVERY, CodecOptions, Codecs
from fusedrec_torchrec.codecs.traffic import Traffic
from fusedrec_torchrec.core.regroup import bucket_major, rank_major

__all__ = ["Wire", "build", "build_backward", "bytes_of_row"]

logger = logging.getLogger(__name__)

Counts = list[list[int]]  # [rank][bucket] rows


def build(options: Any, dim: int, device: torch.device) -> Codec:
    """The codec of a bucket.

    Args:
        options: ``CodecOptions``, or a codec of TorchRec's.
        dim: columns of its rows.
        device: where they are.
    """
    if not isinstance(options, CodecOptions):
        return ForeignCodec(options, dim, device)
    if options.type == "int8":
        return Int8(dim)
    if options.type != "dct":
        return Numbers.of(options.type, dim, options.loss_scale)
    density, values = options.density or DENSITY, options.values or "fp32"
    if density == 1:
        return Numbers.of(values, dim)
    if dim > MOST_COLUMNS:
        raise ValueError(f"type is dct for rows of {dim} columns, must be at most {MOST_COLUMNS}")
    relative = options.relative is not False
    if relative and density * dim < 1:
        logger.warning(
            "density is %g for rows of %d columns: fewer entries travel than there are rows, so "
            "some rows send nothing and are not trained",
            density,
            dim,
        )
    return LargestEntries(dim, density, options.every or EVERY, Numbers.of(values, 1), relative)


def build_backward(options: Any, forward: Codec, dim: int, device: torch.device) -> Codec:
    """The codec of a bucket's gradients, which may be of some entries only."""
    if not isinstance(forward, LargestEntries):
        return build(options, dim, device)
    numbers = build(options, 1, device)
    assert isinstance(numbers, Numbers)
    return EntryNumbers(numbers, forward.room)


@lru_cache(maxsize=256)
def bytes_of_row(codecs: Codecs, dim: int) -> tuple[float, float]:
    """Bytes of a row and of its gradient, about: of many rows at once."""
    many, cpu = 1 << 16, torch.device("cpu")
    forward = build(codecs.forward, dim, cpu)
    backward = build_backward(codecs.backward, forward, dim, cpu)
    sizes = [sum(map(sum, codec.sizes([many]))) / many for codec in (forward, backward)]
    return sizes[0], sizes[1]


class Wire:
    """One direction of the exchange of a module's buckets.

    Args:
        codecs: of each bucket.
        dims: columns of each bucket's rows.
    """

    def __init__(self, codecs: Sequence[Codec], dims: Sequence[int]) -> None:
        self.codecs = list(codecs)
        self._dims = list(dims)
        self.traffic = Traffic()

    def _stream_sizes(self, counts: Counts) -> list[list[int]]:
        """[rank][stream of all buckets] bytes."""
        per_stream = [
            stream
            for k, codec in enumerate(self.codecs)
            for stream in codec.sizes([row[k] for row in counts])
        ]
        return [list(of_rank) for of_rank in zip(*per_stream, strict=True)]

    def sizes(self, counts: Counts) -> list[int]:
        """Bytes for (or of) each rank."""
        return [sum(row) for row in self._stream_sizes(counts)]

    def _elements(self, counts: Counts) -> list[list[int]]:
        return [[n * dim for n, dim in zip(row, self._dims, strict=True)] for row in counts]

    def encode(
        self,
        flat: torch.Tensor,
        counts: Counts,
        training: bool,
        entries: Sequence[Entries | None] | None = None,
    ) -> tuple[torch.Tensor, list[Entries | None]]:
        """Bytes of all ranks, and which entries travel.

        Args:
            flat: rows in the order (rank, bucket), float32.
            counts: of them.
            training: whether there will be a backward pass.
            entries: of gradients, which entries of each bucket had travelled.
        """
        streams: list[torch.Tensor] = []
        found: list[Entries | None] = []
        for k, rows in enumerate(bucket_major(flat, self._elements(counts))):
            encoded, which = self.codecs[k].encode(
                rows.view(-1, self._dims[k]),
                [row[k] for row in counts],
                training,
                None if entries is None else entries[k],
            )
            streams += encoded
            found.append(which)
        wire = rank_major(streams, self._stream_sizes(counts))
        self.traffic.plain += flat.nbytes
        self.traffic.coded += wire.nbytes
        return wire, found

    def decode(
        self,
        wire: torch.Tensor,
        counts: Counts,
        out: torch.Tensor,
        entries: Sequence[Entries | None] | None = None,
    ) -> list[Entries | None]:
        """Rows in the order (rank, bucket), into ``out``; returns which entries had travelled."""
        streams = iter(bucket_major(wire, self._stream_sizes(counts)))
        elements, single = self._elements(counts), len(self.codecs) == 1
        rows: list[torch.Tensor] = []
        found: list[Entries | None] = []
        for k, codec in enumerate(self.codecs):
            of_bucket = [row[k] for row in counts]
            own = [next(streams) for _ in codec.sizes(of_bucket)]
            into = out if single else out.new_empty(sum(of_bucket) * self._dims[k])
            which = None if entries is None else entries[k]
            found.append(codec.decode(own, of_bucket, into.view(-1, self._dims[k]), which))
            rows.append(into)
        if not single:
            out.copy_(rank_major(rows, elements))
        return found
