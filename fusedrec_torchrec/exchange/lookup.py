"""The owner's lookup: one FBGEMM table per bucket, one call per bucket.

Local row numbers are the ids, one per bag where rows travel (see ``compat.bucket_table``), and as
they came where owners pool.  The update is FBGEMM's fused optimizer in backward, which sums the
gradients of a row asked for by several ranks before it applies them.
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
from fusedrec_torchrec.core.buffer_order import rank_major
from fusedrec_torchrec.core.stages import stage
from fusedrec_torchrec.exchange.buckets import BucketConfig
from fusedrec_torchrec.exchange.context import ReceivedRows
from fusedrec_torchrec.exchange.replication import Replication, Replications

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
        self._frozen = frozenset(frozen)  # the kernels are made by the next line
        self._buckets = {id(bucket.per_rank[rank]): bucket for bucket in buckets}
        super().__init__(grouped_configs=[b.per_rank[rank] for b in buckets], **kwargs)
        self.replication = Replications([] if replicate is None else replicate(self.kernels))

    @property
    def kernels(self) -> list[BucketKernel]:
        """The kernel of each bucket."""
        return list(self._emb_modules)

    def register_optim_state_tracker_fn(self, record_fn: Any) -> None:
        refuse_tracker(t.name for config in self.grouped_configs for t in config.embedding_tables)

    def flush(self) -> None:
        """Makes the tables fit to be read; TorchRec calls it before a state dict is made."""
        self.replication.flush()
        super().flush()

    def purge(self) -> None:
        """Makes the tables fit to be overwritten; TorchRec calls it before it loads a state."""
        self.replication.purge()
        super().purge()

    def _create_embedding_kernel(
        self,
        config: GroupedEmbeddingConfig,
        device: torch.device | None,
        pg: dist.ProcessGroup | None,
        *_: Any,
    ) -> BaseEmbedding:
        whole = self._buckets[id(config)].config
        first = whole.embedding_tables[0]
        frozen = first.name in self._frozen
        return BucketKernel(config, first.local_cols, first.compute_kernel, pg, device, frozen)

    def forward(self, sparse_features: ReceivedRows) -> torch.Tensor:
        with stage("lookup"):
            return self._look_up(sparse_features)

    def _look_up(self, sparse_features: ReceivedRows) -> torch.Tensor:
        context = sparse_features.context
        if context.replicas is not None:
            context.replicas.enter()
        asked = sparse_features.asked()
        looked_up = self.replication.look_up(asked)
        if looked_up is None:
            looked_up = [
                kernel(bucket.rows_R, bucket.offsets_U1, bucket.weights_R)
                for kernel, bucket in zip(self._emb_modules, asked, strict=True)
            ]
        elements = [
            [n * rows_UD.size(1) for n, rows_UD in zip(row, looked_up, strict=True)]
            for row in context.counts_in
        ]
        return rank_major([rows_UD.view(-1) for rows_UD in looked_up], elements)

    def prefetch(
        self, sparse_features: ReceivedRows, forward_stream: torch.Stream | None = None
    ) -> None:
        """Brings rows of host memory into the device's cache ahead of the lookup."""
        for kernel, bucket in zip(self._emb_modules, sparse_features.asked(), strict=True):
            kernel.prefetch(bucket.rows_R, bucket.offsets_U1, forward_stream)
