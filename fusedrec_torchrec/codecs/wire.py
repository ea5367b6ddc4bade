"""Puts the rows of all buckets through their codecs into one buffer of bytes, and back.

Buffers are in the order (rank, bucket, stream), so that one all-to-all moves them.
"""

import logging
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch

from fusedrec_torchrec.codecs.codec import Codec, Entries, as_bytes
from fusedrec_torchrec.codecs.dct import MOST_COLUMNS, DctCodec
from fusedrec_torchrec.codecs.int8 import Int8Codec
from fusedrec_torchrec.codecs.numbers import EntryCodec, NumberCodec
from fusedrec_torchrec.codecs.options import DENSITY, EVERY, CodecOptions, Codecs
from fusedrec_torchrec.codecs.registry import RegistryCodec
from fusedrec_torchrec.codecs.traffic import Traffic
from fusedrec_torchrec.core import gpu, operators
from fusedrec_torchrec.core.buffer_order import bucket_major, rank_major

__all__ = ["Wire", "build", "build_backward", "bytes_of_row"]

logger = logging.getLogger(__name__)

MOST_OF_KERNEL = 4096  # columns that a program can have in hand

Counts = list[list[int]]  # [rank][bucket] rows


def build(options: Any, dim: int, device: torch.device) -> Codec:
    """Builds the codec of a bucket's rows.

    Args:
        options: ``CodecOptions``, or a codec of TorchRec's registry.
        dim: columns of its rows.
        device: where they are.
    """
    if not isinstance(options, CodecOptions):
        return RegistryCodec(options, dim, device)
    if options.type == "int8":
        return Int8Codec(dim)
    if options.type != "dct":
        return NumberCodec.of(options.type, dim, options.loss_scale)
    density, values = options.density or DENSITY, options.values or "fp32"
    if density == 1:
        return NumberCodec.of(values, dim)
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
    return DctCodec(dim, density, options.every or EVERY, NumberCodec.of(values, 1), relative)


def build_backward(options: Any, forward: Codec, dim: int, device: torch.device) -> Codec:
    """Builds the codec of a bucket's gradients, which may be those of some entries only."""
    if not isinstance(forward, DctCodec):
        return build(options, dim, device)
    numbers = build(options, 1, device)
    assert isinstance(numbers, NumberCodec)
    return EntryCodec(numbers, forward.room)


@lru_cache(maxsize=256)
def bytes_of_row(codecs: Codecs, dim: int) -> tuple[float, float]:
    """Returns the bytes of a row and of its gradient, as an average over many rows."""
    many, cpu = 1 << 16, torch.device("cpu")
    forward = build(codecs.forward, dim, cpu)
    backward = build_backward(codecs.backward, forward, dim, cpu)
    sizes = [sum(map(sum, codec.sizes([many]))) / many for codec in (forward, backward)]
    return sizes[0], sizes[1]


class Wire:
    """Encodes and decodes the rows of a module's buckets in one direction of the exchange.

    Args:
        codecs: one for each bucket.
        dims: columns of each bucket's rows.
    """

    def __init__(self, codecs: Sequence[Codec], dims: Sequence[int]) -> None:
        self.codecs = list(codecs)
        self._dims = list(dims)
        self.traffic = Traffic()
        kinds = [codec.as_kernel for codec in self.codecs]
        known = [kind for kind in kinds if kind is not None and kind[0] in gpu.FORMATS]
        self._formats = [gpu.FORMATS.index(name) for name, _ in known]
        self._scales = [scale for _, scale in known]
        self._is_plain = all(kind == ("fp32", 0.0) for kind in kinds)
        self._has_kernel = len(known) == len(kinds) and all(
            dim % 4 == 0 and dim <= MOST_OF_KERNEL for dim in dims
        )

    def of_buckets(self, buckets: Sequence[int]) -> "Wire":
        """Returns the same for some of the buckets, which counts what it sends here."""
        part = Wire([self.codecs[k] for k in buckets], [self._dims[k] for k in buckets])
        part.traffic = self.traffic
        return part

    def _by_kernel(self, rows: torch.Tensor) -> bool:
        """Returns whether one kernel is there for the rows of all buckets."""
        if not self._has_kernel or not rows.is_cuda or rows.dtype != torch.float32:
            return False
        return operators.available_on(rows.device, "encode_rows", "decode_rows")

    def _stream_sizes(self, counts: Counts) -> list[list[int]]:
        """Returns the bytes of every stream of every bucket, as [rank][stream]."""
        per_stream = [
            stream
            for k, codec in enumerate(self.codecs)
            for stream in codec.sizes([row[k] for row in counts])
        ]
        return [list(sizes) for sizes in zip(*per_stream, strict=True)]

    def sizes(self, counts: Counts) -> list[int]:
        """Returns the bytes for (or of) each rank."""
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
        """Returns the bytes for all ranks, and for each bucket the entries that travel.

        Args:
            flat: rows in the order (rank, bucket), float32.
            counts: [rank][bucket] number of these rows.
            training: whether there will be a backward pass.
            entries: for gradients, the entries of each bucket that had travelled.
        """
        if self._is_plain and flat.dtype == torch.float32:
            self.traffic.add(flat.nbytes, flat.nbytes)
            return as_bytes(flat), [None] * len(self.codecs)
        if self._by_kernel(flat):
            sizes = [n for row in counts for n in row]
            wire = torch.ops.fusedrec.encode_rows(
                flat.contiguous(), sizes, self._dims, self._formats, self._scales
            )
            self.traffic.add(flat.nbytes, wire.nbytes)
            return wire, [None] * len(self.codecs)
        streams: list[torch.Tensor] = []
        travelling: list[Entries | None] = []
        for k, rows in enumerate(bucket_major(flat, self._elements(counts))):
            encoded, bucket_entries = self.codecs[k].encode(
                rows.view(-1, self._dims[k]),
                [row[k] for row in counts],
                training,
                None if entries is None else entries[k],
            )
            streams += encoded
            travelling.append(bucket_entries)
        wire = rank_major(streams, self._stream_sizes(counts))
        self.traffic.add(flat.nbytes, wire.nbytes)
        return wire, travelling

    def decode(
        self,
        wire: torch.Tensor,
        counts: Counts,
        out: torch.Tensor,
        entries: Sequence[Entries | None] | None = None,
    ) -> list[Entries | None]:
        """Decodes rows in the order (rank, bucket) into ``out``; returns the entries that came."""
        if self._is_plain and out.dtype == torch.float32:
            out.copy_(wire.view(torch.float32))
            return [None] * len(self.codecs)
        if self._by_kernel(out):
            sizes = [n for row in counts for n in row]
            torch.ops.fusedrec.decode_rows(
                wire, sizes, self._dims, self._formats, self._scales, out
            )
            return [None] * len(self.codecs)
        streams = iter(bucket_major(wire, self._stream_sizes(counts)))
        elements, single = self._elements(counts), len(self.codecs) == 1
        rows: list[torch.Tensor] = []
        travelled: list[Entries | None] = []
        for k, codec in enumerate(self.codecs):
            bucket_counts = [row[k] for row in counts]
            bucket_streams = [next(streams) for _ in codec.sizes(bucket_counts)]
            into = out if single else out.new_empty(sum(bucket_counts) * self._dims[k])
            rows_RD = into.view(-1, self._dims[k])
            forward = None if entries is None else entries[k]
            travelled.append(codec.decode(bucket_streams, bucket_counts, rows_RD, forward))
            rows.append(into)
        if not single:
            out.copy_(rank_major(rows, elements))
        return travelled
