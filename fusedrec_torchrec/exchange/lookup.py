"""The owner's lookup: on CUDA one FBGEMM call, on CPU one per physical table.

Local row numbers are the ids, one per bag where rows travel (see ``compat.bucket_table``), and as
they came where owners pool.  The update is FBGEMM's fused optimizer in backward, which sums the
gradients of a row asked for by several ranks before it applies them.  Which tables are in one call
is decided when the lookup is made.
"""

from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torchrec.distributed.embedding_kernel import BaseEmbedding
from torchrec.distributed.embedding_lookup import GroupedPooledEmbeddingsLookup
from torchrec.distributed.embedding_types import GroupedEmbeddingConfig

from fusedrec_torchrec.compat.bucket_table import BucketKernel
from fusedrec_torchrec.compat.model_trackers import refuse_tracker
from fusedrec_torchrec.core.stages import stage
from fusedrec_torchrec.exchange.asked import Asked
from fusedrec_torchrec.exchange.buckets import BucketConfig, physical_tables
from fusedrec_torchrec.exchange.context import ReceivedRows
from fusedrec_torchrec.exchange.joint_call import JointCall, joint_tables
from fusedrec_torchrec.exchange.replication import Replication, Replications
from fusedrec_torchrec.exchange.row_changes import RowChanges
from fusedrec_torchrec.exchange.table_call import TableCall
from fusedrec_torchrec.exchange.wire_order import in_wire_order

__all__ = ["FusedLookup"]

Replicate = Callable[[Sequence[BucketKernel]], Sequence[Replication]]
"""Makes what replicates rows of buckets."""


class FusedLookup(GroupedPooledEmbeddingsLookup):
    """Looks up local rows in the order of arrival, into a flat buffer of rows in that order.

    Args:
        rank: of these tables.
        buckets: all buckets of the module; those without tables on this rank are asked for nothing.
        frozen: names of tables that are looked up, but not trained.
        replicate: makes what replicates rows of the buckets; nothing does if None.
        **kwargs: those of ``GroupedPooledEmbeddingsLookup``.

    Attributes:
        replication: rows of the tables that live on several ranks.
        changes: notes what changes the rows.
    """

    def __init__(
        self,
        *,
        rank: int,
        buckets: Sequence[BucketConfig],
        frozen: Collection[str] = (),
        replicate: Replicate | None = None,
        **kwargs: Any,
    ) -> None:
        device: torch.device | None = kwargs.get("device")
        # The kernels are made in the constructor of TorchRec's lookup.
        self._frozen = frozenset(frozen)
        self.changes = RowChanges()
        self._tables = physical_tables(buckets)
        own = [table.per_rank[rank] for table in self._tables]
        self._numbers = {id(config): number for number, config in enumerate(own)}
        joint = joint_tables(self._tables, rank, device or torch.device("cpu"), self._frozen)
        self._parts = {
            number: tables.memory.part(i)
            for tables in joint
            for i, number in enumerate(tables.tables)
        }
        super().__init__(grouped_configs=own, **kwargs)
        self.replication = Replications([] if replicate is None else replicate(self.kernels))
        self._dims = [bucket.config.embedding_tables[0].local_cols for bucket in buckets]
        self._calls_of_tables = [
            TableCall(table, kernel)
            for table, kernel in zip(self._tables, self.kernels, strict=True)
        ]
        self._calls: list[TableCall | JointCall] = [*self._calls_of_tables]
        if not self.replication.shares_updates:
            self._calls = [
                *(JointCall(tables, self.kernels, self._dims) for tables in joint),
                *(c for n, c in enumerate(self._calls_of_tables) if n not in self._parts),
            ]

    @property
    def kernels(self) -> list[BucketKernel]:
        """The kernel of each physical table."""
        return list(self._emb_modules)

    def register_optim_state_tracker_fn(self, record_fn: Any) -> None:
        refuse_tracker(t.name for config in self.grouped_configs for t in config.embedding_tables)

    def flush(self) -> None:
        """Makes the tables fit to be read; TorchRec calls it before a state dict is made."""
        self.replication.flush()
        super().flush()

    def purge(self) -> None:
        """Makes the tables fit to be overwritten; TorchRec calls it before it loads a state."""
        self.changes.overwrite()
        self.replication.purge()
        super().purge()

    def _create_embedding_kernel(
        self,
        config: GroupedEmbeddingConfig,
        device: torch.device | None,
        pg: dist.ProcessGroup | None,
        *_: Any,
    ) -> BaseEmbedding:
        number = self._numbers[id(config)]
        first, part = self._tables[number].config.embedding_tables[0], self._parts.get(number)
        frozen = first.name in self._frozen
        kind = first.local_cols, first.compute_kernel
        return BucketKernel(config, *kind, pg, device, frozen, part)

    def forward(self, sparse_features: ReceivedRows) -> torch.Tensor:
        with stage("lookup"):
            return self._look_up(sparse_features)

    def _look_up(self, sparse_features: ReceivedRows) -> torch.Tensor:
        context = sparse_features.context
        if context.early is not None and context.early.since != self.changes.count:
            context.early = None  # they were sent before rows changed: all travel now
        if context.replicas is not None:
            context.replicas.enter()
        asked = self.asked(sparse_features)
        looked_up = self.replication.look_up(asked)
        if looked_up is None:
            looked_up = self.look_up(asked, context.counts_in)
        return in_wire_order(
            looked_up, [call.buckets for call in self._calls], context.counts_in, self._dims
        )

    def asked(self, received: ReceivedRows) -> list[Asked]:
        """Returns what is asked in each call, requester after requester."""
        of_buckets = received.asked()
        return [call.asked(of_buckets, received) for call in self._calls]

    def look_up(self, asked: Sequence[Asked], counts: list[list[int]]) -> list[torch.Tensor]:
        """Returns what is asked in each call.

        Args:
            asked: in each call.
            counts: [requester][bucket] units.
        """
        return [
            call.look_up(of_call, counts) for call, of_call in zip(self._calls, asked, strict=True)
        ]

    def prefetch(
        self, sparse_features: ReceivedRows, forward_stream: torch.Stream | None = None
    ) -> None:
        """Brings rows of host memory into the device's cache ahead of the lookup."""
        if not any(kernel.has_cache for kernel in self.kernels):
            return
        of_buckets = sparse_features.asked()
        for call, kernel in zip(self._calls_of_tables, self.kernels, strict=True):
            if kernel.has_cache:
                asked = call.asked(of_buckets, sparse_features)
                kernel.prefetch(asked.rows_R, asked.offsets_U1, forward_stream)
