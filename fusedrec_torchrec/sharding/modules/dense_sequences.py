"""Data-parallel tables of an EmbeddingCollection on CPU.

FBGEMM's dense CPU kernel pools although TorchRec asks it not to, so TorchRec's own
EmbeddingCollection fails with data-parallel tables there.  A plain gather does the same job.
"""

from typing import Any

import torch
from torchrec.distributed.batched_embedding_kernel import BatchedDenseEmbedding
from torchrec.distributed.embedding_kernel import BaseEmbedding
from torchrec.distributed.embedding_lookup import GroupedEmbeddingsLookup
from torchrec.distributed.embedding_types import GroupedEmbeddingConfig
from torchrec.distributed.sharding.dp_sequence_sharding import DpSequenceEmbeddingSharding
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

__all__ = ["CpuDpSequenceEmbeddingSharding"]


class _GatherEmbedding(BatchedDenseEmbedding):
    """TorchRec's dense kernel with a gather in place of FBGEMM's lookup."""

    def __init__(
        self, config: GroupedEmbeddingConfig, pg: Any = None, device: torch.device | None = None
    ) -> None:
        super().__init__(config, pg, device)
        table_starts = torch.tensor([0, *self._local_rows]).cumsum(0)
        self._feature_starts = table_starts[torch.tensor(self._feature_table_map)]

    def forward(self, features: KeyedJaggedTensor) -> torch.Tensor:
        ids_N = features.values().long()
        counts = torch.tensor(features.length_per_key())
        rows_N = ids_N + self._feature_starts.repeat_interleave(counts, output_size=ids_N.numel())
        return self.emb_module.weights.view(-1, self._local_cols[0]).index_select(0, rows_N)


class _GatherLookup(GroupedEmbeddingsLookup):
    def _create_embedding_kernel(
        self, config: GroupedEmbeddingConfig, pg: Any, device: torch.device | None, *args: Any
    ) -> BaseEmbedding:
        return _GatherEmbedding(config, pg, device)


class CpuDpSequenceEmbeddingSharding(DpSequenceEmbeddingSharding):
    """TorchRec's data-parallel sequence sharding, with a lookup that works on CPU."""

    def create_lookup(
        self,
        device: torch.device | None = None,
        fused_params: dict[str, Any] | None = None,
        feature_processor: Any = None,
    ) -> GroupedEmbeddingsLookup:
        return _GatherLookup(
            grouped_configs=self._grouped_embedding_configs,
            pg=self._env.process_group,
            device=device or self._device,
        )
