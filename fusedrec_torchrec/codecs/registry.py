"""Codecs of TorchRec's registry for quantized communication, applied to fused tables.

A ``qcomm_codecs_registry`` has codecs for each of TorchRec's collectives.  The rows of fused tables
travel in an all-to-all, so those of the all-to-all count: of pooled embeddings for an
EmbeddingBagCollection, although what travels here are its rows, and of sequences for an
EmbeddingCollection.  Where FBGEMM's codec is one that we have ourselves, ours is taken: it scales
fp16 by itself and quantizes int8 row by row, whatever the embedding dimension.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from fbgemm_gpu.quantize_comm import QuantizedCommCodec as FbgemmCodec
from torchrec.distributed.types import CommOp, NoOpQuantizedCommCodec, QuantizedCommCodecs

from fusedrec_torchrec.codecs.codec import Codec, Entries, as_bytes, as_numbers
from fusedrec_torchrec.codecs.options import WHOLE_ROWS, CodecOptions
from fusedrec_torchrec.compat.quantized_communication import loss_scale_of, precision_of

__all__ = ["RegistryCodec", "RegistryCodecs", "codecs_of_registry"]

POOLED = (CommOp.POOLED_EMBEDDINGS_ALL_TO_ALL, CommOp.POOLED_EMBEDDINGS_REDUCE_SCATTER)
SEQUENCES = (CommOp.SEQUENCE_EMBEDDINGS_ALL_TO_ALL,)


@dataclass(frozen=True)
class RegistryCodecs:
    """The codecs that a registry has for fused tables: our ``CodecOptions`` or its own."""

    forward: Any
    backward: Any


def codecs_of_registry(
    registry: Mapping[str, QuantizedCommCodecs] | None, pooled: bool
) -> RegistryCodecs | None:
    """Returns the codecs that a registry has for the rows of fused tables; None if it has none."""
    for op in POOLED if pooled else SEQUENCES:
        codecs = (registry or {}).get(op.name)
        if codecs is not None:
            return RegistryCodecs(_options(codecs.forward), _options(codecs.backward))
    return None


def _options(codec: Any) -> Any:
    """Returns our own options for a codec that we have, or else the codec itself."""
    if isinstance(codec, NoOpQuantizedCommCodec):
        return CodecOptions()
    if type(codec) is FbgemmCodec and str(precision_of(codec).value) in WHOLE_ROWS:
        kind: Any = str(precision_of(codec).value)
        return CodecOptions(type=kind, loss_scale=loss_scale_of(codec))
    return codec


class RegistryCodec(Codec):
    """Applies any ``QuantizedCommCodec`` of TorchRec's to the rows of each rank.

    Args:
        codec: the user's.
        dim: columns of the rows.
        device: where they are.

    Raises:
        ValueError: it does not work there, or not with so many columns.
    """

    def __init__(self, codec: Any, dim: int, device: torch.device) -> None:
        self._codec = codec
        self._dim = dim
        try:  # some work on some devices, and with some dimensions only
            ones = torch.ones(2, dim, device=device)
            counts = [1, 0, 1]
            streams, _ = self.encode(ones, counts, False)
            self.decode(streams, counts, torch.empty_like(ones))
            sizes_match = [s.numel() for s in streams] == [sum(s) for s in self.sizes(counts)]
        except Exception as error:
            raise ValueError(
                f"qcomm_codecs_registry has a codec ({self._name}) that fails on {device.type} for "
                f"rows of {dim} columns: {error}; must be one of {', '.join(WHOLE_ROWS)}, or one "
                "that encodes single rows there"
            ) from error
        if not sizes_match:
            raise ValueError(
                f"qcomm_codecs_registry has a codec ({self._name}) whose calc_quantized_size is "
                "not the size of what it encodes"
            )

    @property
    def _name(self) -> str:
        precision = precision_of(self._codec)
        return f"{type(self._codec).__name__}" + (f" {precision}" if precision else "")

    def sizes(self, counts: Sequence[int]) -> list[list[int]]:
        context, item = self._codec.create_context(), self._codec.quantized_dtype.itemsize
        size = self._codec.calc_quantized_size
        return [[size(n * self._dim, context) * item if n else 0 for n in counts]]

    def encode(
        self,
        rows_RD: torch.Tensor,
        counts: Sequence[int],
        training: bool,
        entries: Entries | None = None,
    ) -> tuple[list[torch.Tensor], Entries | None]:
        context = self._codec.create_context()
        encoded = [
            as_bytes(self._codec.encode(rows.reshape(-1), context))
            for rows in rows_RD.split(list(counts))
            if rows.numel()
        ]
        empty = torch.empty(0, dtype=torch.uint8, device=rows_RD.device)
        return [torch.cat(encoded) if encoded else empty], None

    def decode(
        self,
        streams: Sequence[torch.Tensor],
        counts: Sequence[int],
        out_RD: torch.Tensor,
        entries: Entries | None = None,
    ) -> Entries | None:
        # What encoding writes into its context, such as the width of an encoded row, is asked for
        # by decoding; both sides have the same settings.
        context = self._codec.create_context()
        self._codec.encode(torch.ones(self._dim, device=out_RD.device), context)
        sizes = self.sizes(counts)[0]
        for segment, rows in zip(streams[0].split(sizes), out_RD.split(list(counts)), strict=True):
            if rows.numel():
                encoded = as_numbers(segment, self._codec.quantized_dtype)
                rows.copy_(self._codec.decode(encoded, context).view_as(rows))
        return None
