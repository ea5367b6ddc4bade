"""The owner's lookup: one FBGEMM call per physical table, some if there are very many ids.

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
from fusedrec_torchrec.core.stages import stage
from fusedrec_torchrec.exchange.asked import Asked, joined
from fusedrec_torchrec.exchange.buckets import BucketConfig, PhysicalTable, physical_tables
from fusedrec_torchrec.exchange.context import ReceivedRows
from fusedrec_torchrec.exchange.large_lookups import TableLookup
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
        self._tables = physical_tables(buckets)
        self._whole = {id(table.per_rank[rank]): table.config for table in self._tables}
        super().__init__(grouped_configs=[t.per_rank[rank] for t in self._tables], **kwargs)
        self.replication = Replications([] if replicate is None else replicate(self.kernels))

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
        self.replication.purge()
        super().purge()

    def _create_embedding_kernel(
        self,
        config: GroupedEmbeddingConfig,
        device: torch.device | None,
        pg: dist.ProcessGroup | None,
        *_: Any,
    ) -> BaseEmbedding:
        first = self._whole[id(config)].embedding_tables[0]
        frozen = first.name in self._frozen
        return BucketKernel(config, first.local_cols, first.compute_kernel, pg, device, frozen)

    def forward(self, sparse_features: ReceivedRows) -> torch.Tensor:
        with stage("lookup"):
            return self._look_up(sparse_features)

    def _look_up(self, sparse_features: ReceivedRows) -> torch.Tensor:
        context = sparse_features.context
        if context.replicas is not None:
            context.replicas.enter()
        asked = self.asked(sparse_features)
        looked_up = self.replication.look_up(asked)
        if looked_up is None:
            looked_up = self.of_tables(asked, context.counts_in)
        if len(looked_up) == 1:
            return looked_up[0].view(-1)
        return self._in_wire_order(looked_up, context.counts_in)

    def of_tables(self, asked: Sequence[Asked], counts: list[list[int]]) -> list[torch.Tensor]:
        """Returns what is asked of each physical table.

        Args:
            asked: of each physical table.
            counts: [requester][bucket] units.
        """
        return [
            self._rows_or_bags(table, kernel, of_table, counts)
            for table, kernel, of_table in zip(self._tables, self.kernels, asked, strict=True)
        ]

    def _rows_or_bags(
        self, table: PhysicalTable, kernel: BucketKernel, asked: Asked, counts: list[list[int]]
    ) -> torch.Tensor:
        by_table = None
        if table.rows is None and table.bags is not None and kernel.can_show_tables:
            units = [row[table.bags] for row in counts]
            by_table = TableLookup.of(asked, units, kernel.table_starts_T)
        if by_table is None:
            return kernel(asked.rows_R, asked.offsets_U1, asked.weights_R)
        return by_table.look_up(
            lambda tables, of_tables: kernel.look_up_tables(
                tables, of_tables.rows_R, of_tables.offsets_U1, of_tables.weights_R
            )
        )

    def asked(self, received: ReceivedRows) -> list[Asked]:
        """Returns what is asked of each physical table, requester after requester."""
        of_buckets, context = received.asked(), received.context
        counts, row_buckets = context.counts_in, len(context.counts_in[0]) - len(context.ids_in[0])
        asked = []
        for table in self._tables:
            if table.rows is None or table.bags is None:
                (bucket,) = table.buckets
                asked.append(of_buckets[bucket])
                continue
            asked.append(
                joined(
                    of_buckets[table.rows],
                    of_buckets[table.bags],
                    [row[table.rows] for row in counts],
                    [row[table.bags] for row in counts],
                    [row[table.bags - row_buckets] for row in context.ids_in],
                )
            )
        return asked

    def _in_wire_order(
        self, looked_up: Sequence[torch.Tensor], counts: list[list[int]]
    ) -> torch.Tensor:
        """Returns all rows in the order (requester, bucket)."""
        pieces: dict[tuple[int, int], torch.Tensor] = {}
        for table, rows_UD in zip(self._tables, looked_up, strict=True):
            places = [(r, k) for r in range(len(counts)) for k in table.buckets]
            parts = rows_UD.split([counts[r][k] for r, k in places])
            for (r, k), part in zip(places, parts, strict=True):
                pieces[r, k] = part.reshape(-1)
        return torch.cat([pieces[place] for place in sorted(pieces)])

    def prefetch(
        self, sparse_features: ReceivedRows, forward_stream: torch.Stream | None = None
    ) -> None:
        """Brings rows of host memory into the device's cache ahead of the lookup."""
        for kernel, of_table in zip(self._emb_modules, self.asked(sparse_features), strict=True):
            kernel.prefetch(of_table.rows_R, of_table.offsets_U1, forward_stream)
