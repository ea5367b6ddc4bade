"""What a rank remembers of one batch between input dist and backward.

It hangs on TorchRec's module context, never on a module: the training pipelines hold two
batches in flight.
"""

from dataclasses import dataclass, field

import torch
from torchrec.distributed.sharding.sequence_sharding import SequenceShardingContext
from torchrec.streamable import Multistreamable

from fusedrec_torchrec.exchange.bags import Bags
from fusedrec_torchrec.exchange.replication import BatchReplicas

__all__ = ["FusedShardingContext", "ReceivedRows"]


@dataclass
class FusedShardingContext(SequenceShardingContext):
    """The requester's side of a batch.

    Attributes:
        bags: which received rows form which output row, per bucket.
        weights_N: weights of the ids in the order of the batch, or None.
        ids_per_bucket: how many of the ids belong to each bucket.
        counts_out: [owner][bucket] rows this rank asked for; of the replicas last, if any rows are
            replicated.
        counts_in: [requester][bucket] rows this rank was asked for.
        replicas: what takes care of the batch's replicated rows; None if no rows are.
    """

    bags: list[Bags] = field(default_factory=list)
    weights_N: torch.Tensor | None = None
    ids_per_bucket: list[int] = field(default_factory=list)
    counts_out: list[list[int]] = field(default_factory=list)
    counts_in: list[list[int]] = field(default_factory=list)
    replicas: BatchReplicas | None = None

    def record_stream(self, stream: torch.Stream) -> None:
        super().record_stream(stream)
        for bags in self.bags:
            bags.record_stream(stream)
        if self.weights_N is not None:
            self.weights_N.record_stream(stream)
        if self.replicas is not None:
            self.replicas.record_stream(stream)


@dataclass
class ReceivedRows(Multistreamable):
    """The owner's side of a batch: local rows asked for, in the order of arrival.

    It knows the requester's side of the same batch, since TorchRec's own context may be of the same
    batch sent once more: a pipeline that is attached again does that.

    TorchRec keeps it in its ``KJTList`` and asks it three things a KeyedJaggedTensor knows;
    the answers below mean "nothing to see".
    """

    rows_R: torch.Tensor
    context: FusedShardingContext

    def record_stream(self, stream: torch.Stream) -> None:
        self.rows_R.record_stream(stream)
        self.context.record_stream(stream)

    def variable_stride_per_key(self) -> bool:
        return False

    def stride(self) -> int:
        return 1

    def lengths(self) -> torch.Tensor:
        return self.rows_R.new_empty(0)
