"""What a rank remembers of one batch between input dist and backward.

It hangs on TorchRec's module context, never on a module: the training pipelines hold two
batches in flight.
"""

from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torchrec.distributed.sharding.sequence_sharding import SequenceShardingContext
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor
from torchrec.streamable import Multistreamable

from fusedrec_torchrec.exchange.asked import Asked
from fusedrec_torchrec.exchange.bags import Bags
from fusedrec_torchrec.exchange.early_rows import EarlyRows
from fusedrec_torchrec.exchange.id_counts import IdCounts, with_counts
from fusedrec_torchrec.exchange.late_gradients import LateGradients
from fusedrec_torchrec.exchange.replication import BatchReplicas
from fusedrec_torchrec.exchange.slot_bags import SlotBags
from fusedrec_torchrec.exchange.slot_sequences import SlotSequences

__all__ = ["FusedShardingContext", "ReceivedRows"]


@dataclass
class FusedShardingContext(SequenceShardingContext):
    """The requester's side of a batch.

    Attributes:
        bags: which received rows form which output row, per bucket.
        slot_bags: the same, for the first buckets, if that is for the device to know; ``bags`` are
            those of the buckets behind them.  Or the sequences of all buckets.
        counts: of the ids of each slot, on their way to the host; None if nobody will ask, or if
            the batch knows.
        picks: the ``SequencePicks`` of a variable batch until its headers are read; else None.
        weights_N: weights of the ids that this rank pools, in the order of the batch, or None.
        ids_per_bucket: how many of these ids belong to each bucket.
        counts_out: [owner][bucket] units this rank asked for: distinct rows, or distinct bags;
            of the replicas last, if any rows are replicated.
        counts_in: [requester][bucket] units this rank was asked for.
        ids_in: [requester][bucket with bags] ids in these units; those buckets come last.
        bag_weights: whether bags travel with weights.
        replicas: what takes care of the batch's replicated rows; None if no rows are.
        early: rows of the batch that have travelled already; None if all are still to come.
        late_gradients: who waits for gradients, after backward; None if backward itself does.
    """

    bags: list[Bags] = field(default_factory=list)
    slot_bags: SlotBags | SlotSequences | None = None
    counts: IdCounts | None = None
    picks: Any = None
    weights_N: torch.Tensor | None = None
    ids_per_bucket: list[int] = field(default_factory=list)
    counts_out: list[list[int]] = field(default_factory=list)
    counts_in: list[list[int]] = field(default_factory=list)
    ids_in: list[list[int]] = field(default_factory=list)
    bag_weights: bool = False
    replicas: BatchReplicas | None = None
    early: EarlyRows | None = None
    late_gradients: LateGradients | None = None

    def count_features(self) -> None:
        """Has the batch know how many ids each feature has, once its headers have been read."""
        counts, self.counts = self.counts, None
        if counts is not None:
            features = cast(KeyedJaggedTensor, self.features_before_input_dist)  # type: ignore[has-type]
            self.features_before_input_dist = with_counts(features, counts.per_slot())

    def segments_in(self) -> list[list[int]]:
        """Returns sizes of what each requester has sent: see ``cargo`` and ``bag_routing``."""
        rows = len(self.counts_in[0]) - len(self.ids_in[0])
        times = 2 if self.bag_weights else 1
        return [
            units[:rows]
            + [n for u, i in zip(units[rows:], ids, strict=True) for n in (u, *[i] * times)]
            for units, ids in zip(self.counts_in, self.ids_in, strict=True)
        ]

    def rows_in(self) -> int:
        """Returns how many rows this rank is asked for, those of bags that it pools included."""
        by_themselves = len(self.counts_in[0]) - len(self.ids_in[0])
        rows = sum(sum(units[:by_themselves]) for units in self.counts_in)
        return rows + sum(map(sum, self.ids_in))

    def words_in(self) -> list[int]:
        """Returns how many words each requester has sent."""
        return [sum(row) for row in self.segments_in()]

    def record_stream(self, stream: torch.Stream) -> None:
        super().record_stream(stream)
        for bags in self.bags:
            bags.record_stream(stream)
        if self.slot_bags is not None:
            self.slot_bags.record_stream(stream)
        if self.weights_N is not None:
            self.weights_N.record_stream(stream)
        if self.picks is not None:
            self.picks.record_stream(stream)
        if self.replicas is not None:
            self.replicas.record_stream(stream)


@dataclass
class ReceivedRows(Multistreamable):
    """The owner's side of a batch: what it is asked for, in the order of arrival.

    It knows the requester's side of the same batch, since TorchRec's own context may be of the same
    batch sent once more: a pipeline that is attached again does that.

    Segments are what ``FusedShardingContext.segments_in`` gives the sizes of, each from all ranks.

    TorchRec keeps it in its ``KJTList`` and asks it three things a KeyedJaggedTensor knows;
    the answers below mean "nothing to see".
    """

    segments: list[torch.Tensor]
    context: FusedShardingContext
    _ready: torch.cuda.Event | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        if self.segments and self.segments[0].is_cuda:
            self._ready = torch.cuda.Event()
            self._ready.record(torch.cuda.current_stream(self.segments[0].device))

    def asked(self) -> list[Asked]:
        """Returns what is asked of each bucket."""
        context = self.context
        rows = len(context.counts_in[0]) - len(context.ids_in[0])
        segments = self.segments
        asked = [Asked(rows_R) for rows_R in segments[:rows]]
        step = 3 if context.bag_weights else 2
        for at in range(rows, len(segments), step):
            lengths_U, rows_R, *weights = segments[at : at + step]
            asked.append(
                Asked(rows_R, lengths_U, weights[0].view(torch.float32) if weights else None)
            )
        return asked

    def record_stream(self, stream: torch.Stream) -> None:
        """Has the stream wait for the rows, too.

        TorchRec's SemiSync pipeline does not, since KeyedJaggedTensors have the host wait.
        """
        if self._ready is not None:
            stream.wait_event(self._ready)
        for segment in self.segments:
            segment.record_stream(stream)
        self.context.record_stream(stream)

    def variable_stride_per_key(self) -> bool:
        return False

    def stride(self) -> int:
        return 1

    def lengths(self) -> torch.Tensor:
        return self.segments[0].new_empty(0)
