"""The input dist: every owner learns which of its rows each requester wants, in ONE all-to-all.

A classic exchange sends counts first, then ids.  Here every message has a fixed capacity and a
header, so that one collective does both:

    message = [ status | wanted capacity | overflow | count per bucket | int32 local rows ... ]

With replicated rows the header also has a *stale* flag, for replicas that must be loaded anew, and
the number of replicated rows of each bucket, the same in all messages of a sender.

- *status*: ``BAD`` if the sender's input is bad.  It still sends its messages, whose rows mean
  nothing then; every rank sees it, and all raise the same error in the same step.
  ``END_OF_DATA`` if the sender has no batch for this step; unless all ranks say so, it is an error
  on all of them.
- *wanted capacity*: the same number in all messages of a sender.  Every rank computes the next
  capacity from the maximum of what it received, so all agree without asking.
- *overflow*: the sender has more ids for some owner than fit.  Every rank sees the flag, and all
  run one exact second round; nothing is lost.

The exact-counts mode is the same protocol with capacity zero: the headers are the counts, and
the second round is the exchange.

With 2D parallelism the exchange is among the ranks of a group, but bad input of one group must stop
all of them, or they would wait for it later on: a small all-gather of all ranks' status words goes
beside the messages.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import torch
import torch.distributed as dist
from torchrec.distributed.embedding_sharding import BaseSparseFeaturesDist
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from fusedrec_torchrec.core.stages import stage
from fusedrec_torchrec.exchange.all_replicated import AllReplicatedAwaitable
from fusedrec_torchrec.exchange.bags import pooled_bags, sequence_bags
from fusedrec_torchrec.exchange.capacity import Capacity
from fusedrec_torchrec.exchange.context import FusedShardingContext, ReceivedRows
from fusedrec_torchrec.exchange.dedup import Dedup, Occurrences, Unique
from fusedrec_torchrec.exchange.keys import KeySpace
from fusedrec_torchrec.exchange.layout import ExchangeLayout
from fusedrec_torchrec.exchange.messages import HeaderAwaitable
from fusedrec_torchrec.exchange.options import ExchangeOptions
from fusedrec_torchrec.exchange.outgoing_batch import (
    BatchNotes,
    IdExchange,
    InputAwaitable,
    OutgoingBatch,
    Report,
)
from fusedrec_torchrec.exchange.replication import Replications
from fusedrec_torchrec.exchange.routing import Route

__all__ = ["FusedInputDist"]


class FusedInputDist(BaseSparseFeaturesDist[ReceivedRows]):
    """Takes batches and sends their ids, up to the rows that owners have received.

    Args:
        pg: the ranks that tables are sharded over.
        layout: where rows live.
        options: the user's settings.
        mean_S: whether a slot is mean-pooled; None for sequences, which do not pool.
        weighted: whether the weights of a batch count.
        replication: rows that live on several ranks; none do if None.
        everyone: all ranks that must hear of bad input; ``pg`` if None.
    """

    def __init__(
        self,
        pg: dist.ProcessGroup,
        layout: ExchangeLayout,
        options: ExchangeOptions,
        mean_S: torch.Tensor | None,
        weighted: bool = False,
        replication: Replications | None = None,
        everyone: dist.ProcessGroup | None = None,
    ) -> None:
        super().__init__()
        self._replication = replication or Replications()
        self.exchange = IdExchange(pg, everyone, layout, Capacity(options), self._replication)
        self._weighted = weighted
        self._layout = layout
        self._keys = KeySpace(layout, options)
        self._dedup = Dedup(layout.part_starts_P1)
        self._pooled = mean_S is not None
        self._mean_per_bucket = [
            mean_S[b.first_slot : b.end_slot].to(layout.device)
            if mean_S is not None and bool(mean_S[b.first_slot : b.end_slot].any())
            else None
            for b in layout.buckets
        ]
        self._notes = BatchNotes()

    @contextmanager
    def noting(self, notes: BatchNotes) -> Iterator[None]:
        """Takes what else there is to know about the batch that is sent in here.

        TorchRec hands over nothing but features.
        """
        self._notes = notes
        try:
            yield
        finally:
            self._notes = BatchNotes()

    def forward(self, features: KeyedJaggedTensor) -> InputAwaitable:
        """Sends the ids of a batch in canonical form."""
        notes = self._notes
        ids_per_slot = features.length_per_key()
        with stage("keys"):
            keys_N, bad = self._keys.keys(features.values(), ids_per_slot)
        with stage("dedup"):
            unique = self._dedup(keys_N, self._replication.index)
        with stage("route"):
            routed = Route(self._layout, unique)

        context = FusedShardingContext(
            batch_size_per_feature_pre_a2a=features.stride_per_key(),
            variable_batch_per_feature=features.variable_stride_per_key(),
            features_before_input_dist=features,
            weights_N=features.weights_or_none() if self._weighted else None,
            ids_per_bucket=[
                sum(ids_per_slot[b.first_slot : b.end_slot]) for b in self._layout.buckets
            ],
            replicas=self._replication.batch(),
        )
        describe = partial(self._keys.describe_bad_ids, features.values(), ids_per_slot)
        reports: list[Report] = [*notes.reports, (bad, describe)]
        batch = OutgoingBatch(self.exchange, context, routed, notes, reports)
        with stage("ids"):
            awaitable = (
                AllReplicatedAwaitable(batch)
                if self._replication.asks_first
                else HeaderAwaitable(batch)
            )
        with stage("bags"):  # while the ids travel
            for bucket, (row_N, occurrences), mean_S in zip(
                self._layout.buckets,
                rows_of_buckets(unique, routed.counts_KO, context.ids_per_bucket),
                self._mean_per_bucket,
                strict=True,
            ):
                context.bags.append(
                    pooled_bags(features, bucket, row_N, mean_S, occurrences)
                    if self._pooled
                    else sequence_bags(row_N, occurrences)
                )
        if notes.training:
            self._replication.count(None if notes.end_of_data else unique.keys_U)
        return awaitable


def rows_of_buckets(
    unique: Unique, counts_KO: torch.Tensor, ids_per_bucket: list[int]
) -> Iterator[tuple[torch.Tensor, Occurrences | None]]:
    """Yields for the ids of each bucket their rows in its matrix, and the ids of each of these."""
    if len(ids_per_bucket) == 1:
        yield unique.inverse_N, unique.occurrences
        return
    counts_K = counts_KO.sum(1)
    first_row_K = counts_K.cumsum(0) - counts_K
    first_id = 0
    for ids, first_row in zip(ids_per_bucket, first_row_K, strict=True):
        own = slice(first_id, first_id + ids)
        occurrences = unique.occurrences
        if occurrences is not None:
            # Of static shape: there are at most as many rows as ids.
            rows = first_row + torch.arange(ids + 1, device=first_row.device)
            starts_U1 = occurrences.starts_U1.index_select(
                0, rows.clamp_(max=occurrences.starts_U1.numel() - 1)
            )
            occurrences = Occurrences(occurrences.order_N[own] - first_id, starts_U1 - first_id)
        yield unique.inverse_N[own] - first_row.int(), occurrences
        first_id += ids
