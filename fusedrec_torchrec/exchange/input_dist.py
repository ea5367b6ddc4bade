"""The input dist: every owner learns which of its rows each requester wants, in ONE all-to-all.

A classic exchange sends counts first, then ids.  Here every message has a fixed capacity and a
header, so that one collective does both:

    message = [ status | wanted capacity | overflow | counts | int32 words ... ]

Counts are the units of each bucket, distinct rows or distinct bags, and the ids of the latter; the
words are local rows, and bags (``cargo``).  With replicated rows the header also has a *stale*
flag, for replicas that must be loaded anew, and the number of replicated rows of each bucket, the
same in all messages of a sender.

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

import torch
import torch.distributed as dist
from torchrec.distributed.embedding_sharding import BaseSparseFeaturesDist
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from fusedrec_torchrec.core.stages import stage
from fusedrec_torchrec.exchange.all_replicated import AllReplicatedAwaitable
from fusedrec_torchrec.exchange.bag_layout import BagLayout
from fusedrec_torchrec.exchange.capacity import Capacity
from fusedrec_torchrec.exchange.cargo import Cargo
from fusedrec_torchrec.exchange.checks import Report
from fusedrec_torchrec.exchange.context import FusedShardingContext, ReceivedRows
from fusedrec_torchrec.exchange.layout import ExchangeLayout
from fusedrec_torchrec.exchange.messages import HeaderAwaitable
from fusedrec_torchrec.exchange.options import ExchangeOptions
from fusedrec_torchrec.exchange.outgoing_batch import (
    BatchNotes,
    IdExchange,
    InputAwaitable,
    OutgoingBatch,
)
from fusedrec_torchrec.exchange.replication import Replications
from fusedrec_torchrec.exchange.requested_bags import BagRequests
from fusedrec_torchrec.exchange.requested_rows import RowRequests

__all__ = ["FusedInputDist"]


class FusedInputDist(BaseSparseFeaturesDist[ReceivedRows]):
    """Takes batches and sends their ids, up to what owners have received.

    Args:
        pg: the ranks that tables are sharded over.
        layout: where the rows of tables live that requesters pool.
        options: the user's settings.
        mean_S: whether a slot is mean-pooled; None for sequences, which do not pool.
        weighted: whether the weights of a batch count.
        replication: rows that live on several ranks; none do if None.
        everyone: all ranks that must hear of bad input; ``pg`` if None.
        bag_layout: where tables live whose owners pool; there are none if None.
        learned_weights: whether weights come from feature processors, later on.
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
        bag_layout: BagLayout | None = None,
        learned_weights: bool = False,
    ) -> None:
        super().__init__()
        self._replication = replication or Replications()
        ranks = layout.world_size
        self.exchange = IdExchange(pg, everyone, ranks, Capacity(options), self._replication)
        self._weighted = weighted
        self._rows = self._bags = None
        if layout.buckets:
            self._rows = RowRequests(
                layout, options, mean_S, weighted, learned_weights, self._replication
            )
        if bag_layout is not None and bag_layout.buckets:
            assert mean_S is not None, "sequences are not pooled"
            means = mean_S[bag_layout.first_slot :].tolist()
            self._bags = BagRequests(bag_layout, options, means, weighted)
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
        rows = None if self._rows is None else self._rows(features)
        bags = None if self._bags is None else self._bags(features, notes.refused)
        requested = [units for units in (rows, bags) if units is not None]
        context = FusedShardingContext(
            batch_size_per_feature_pre_a2a=features.stride_per_key(),
            variable_batch_per_feature=features.variable_stride_per_key(),
            features_before_input_dist=features,
            slot_bags=None if rows is None else rows.slot_bags,
            counts=None if rows is None else rows.counts,
            weights_N=None if rows is None else rows.weights_N,
            ids_per_bucket=[] if rows is None else rows.ids_per_bucket,
            bag_weights=self._weighted,
            replicas=self._replication.batch(),
        )
        reports: list[Report] = [
            *notes.reports,
            *((units.bad, units.describe_bad) for units in requested),
        ]
        cargo = Cargo(
            self.exchange.ranks,
            None if rows is None else rows.route,
            None if bags is None else bags.route,
        )
        batch = OutgoingBatch(self.exchange, context, cargo, notes, reports)
        with stage("ids"):
            awaitable = (
                AllReplicatedAwaitable(batch)
                if self._replication.asks_first
                else HeaderAwaitable(batch)
            )
        with stage("bags"):  # while the ids travel
            context.bags = [of_bucket for units in requested for of_bucket in units.bags()]
        if notes.training and rows is not None:
            self._replication.count(None if notes.end_of_data else rows.numbered.keys_U)
        return awaitable
