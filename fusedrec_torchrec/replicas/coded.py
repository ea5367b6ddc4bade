"""Gradients of rows that several ranks have, in fewer bytes.

What a codec takes from a gradient is kept, and added to the row's next one: thresholds with error
feedback, as for the dense part of a model.  A message has the places of all buckets and then the
streams of their codecs, each rounded up to whole words of four bytes.
"""

from collections.abc import Sequence

import torch

from fusedrec_torchrec.codecs.dct import DctCodec
from fusedrec_torchrec.codecs.options import CodecOptions
from fusedrec_torchrec.codecs.wire import build
from fusedrec_torchrec.replicas.replica import Replica

__all__ = ["CodedGradients", "coded_gradients"]

WORD = 4


def coded_gradients(
    options: CodecOptions | None, replicas: Sequence[Replica]
) -> "CodedGradients | None":
    """Makes what codes gradients; None if they travel as they are.

    Raises:
        ValueError: they may not be changed on the way.
    """
    if options is None or options.is_exact:
        return None
    if any(replica.clips for replica in replicas):
        raise ValueError(
            f"codec is {options.type} and the optimizer clips gradients (gradient_clipping), must "
            "be without: what is left of a gradient would be clipped again"
        )
    return CodedGradients(options, replicas)


class CodedGradients:
    """Codecs of all buckets, and what they have left.

    Args:
        options: the user's settings.
        replicas: of each bucket.
    """

    def __init__(self, options: CodecOptions, replicas: Sequence[Replica]) -> None:
        self.left = [
            torch.zeros(max(replica.capacity, 1), replica.dim, device=replica.tensors[0].device)
            for replica in replicas
        ]
        """[places, columns] of each bucket: what has not travelled yet."""
        self._codecs = [build(options, left.size(1), left.device) for left in self.left]

    def _sizes(self, row: Sequence[int]) -> list[list[int]]:
        """Returns [bucket][stream] bytes of a message with so many places of each bucket."""
        return [
            [stream[0] for stream in codec.sizes([n])]
            for codec, n in zip(self._codecs, row, strict=True)
        ]

    def words(self, row: Sequence[int]) -> int:
        """Returns the size of a message with so many places of each bucket."""
        return sum(row) + sum(-(-size // WORD) for streams in self._sizes(row) for size in streams)

    def pack(
        self, places: Sequence[torch.Tensor], gradients: Sequence[torch.Tensor]
    ) -> list[torch.Tensor]:
        """Returns the pieces of a message, int32."""
        pieces = list(places)
        for codec, left, places_M, gradients_MD in zip(
            self._codecs, self.left, places, gradients, strict=True
        ):
            index, counts = places_M.long(), [len(places_M)]
            wanted_MD = gradients_MD.float() + left.index_select(0, index)
            streams, _ = codec.encode(wanted_MD, counts, training=True)
            arrives_MD = torch.empty_like(wanted_MD)
            codec.decode(streams, counts, arrives_MD)
            # Of numbers that are none, nothing is left.
            left.index_copy_(0, index, wanted_MD.sub_(arrives_MD).nan_to_num_(0.0, 0.0, 0.0))
            pieces += [_words(stream) for stream in streams]
        return pieces

    def unpack(
        self, messages: Sequence[torch.Tensor], counts: Sequence[Sequence[int]]
    ) -> tuple[list[Sequence[torch.Tensor]], list[list[torch.Tensor]], list[torch.Tensor]]:
        """Returns places and gradients, [rank][bucket] each, and those of a bucket in one."""
        whole = [
            left.new_empty(sum(row[k] for row in counts), left.size(1))
            for k, left in enumerate(self.left)
        ]
        outs = [of_bucket.split([row[k] for row in counts]) for k, of_bucket in enumerate(whole)]
        places, rows = [], []
        for rank, (message, row) in enumerate(zip(messages, counts, strict=True)):
            places.append(message[: sum(row)].split(list(row)))
            rows.append([out[rank] for out in outs])
            sizes = self._sizes(row)
            padded = [-(-size // WORD) * WORD for streams in sizes for size in streams]
            pieces = iter(message[sum(row) :].view(torch.uint8).split(padded))
            for codec, n, of_bucket, out in zip(self._codecs, row, sizes, rows[-1], strict=True):
                streams = [next(pieces)[:size] for size in of_bucket]
                codec.decode(streams, [n], out)
        return places, rows, whole

    def thresholds(self) -> dict[str, torch.Tensor]:
        """Returns the state of the codecs that have one, by the number of the bucket."""
        return {
            f"{k}.threshold": codec.threshold.state()
            for k, codec in enumerate(self._codecs)
            if isinstance(codec, DctCodec)
        }

    def load_thresholds(self, states: Sequence[dict[str, torch.Tensor]]) -> None:
        for k, codec in enumerate(self._codecs):
            saved = [s[f"{k}.threshold"] for s in states if f"{k}.threshold" in s]
            if isinstance(codec, DctCodec):
                codec.threshold.load(saved)


def _words(stream: torch.Tensor) -> torch.Tensor:
    missing = -stream.numel() % WORD
    if missing or stream.storage_offset() % WORD:
        stream = torch.cat([stream, stream.new_zeros(missing)])
    return stream.view(torch.int32)
