"""Range checks for the ids of stock tables beside fused ones."""

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any

import torch
from torchrec.distributed.embedding_sharding import EmbeddingSharding
from torchrec.distributed.types import ParameterSharding
from torchrec.modules.embedding_configs import BaseEmbeddingConfig
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from fusedrec_torchrec.core.transfer import to_device
from fusedrec_torchrec.sharding.sharding_type import FUSED, FUSED_TYPES

__all__ = ["StockIds"]


class StockIds:
    """Range checks for the ids of a module's stock tables.

    TorchRec leaves them to FBGEMM, which trains row 0 instead of a row that does not exist.
    """

    def __init__(
        self,
        configs: Sequence[BaseEmbeddingConfig],
        plan: Mapping[str, ParameterSharding],
        shardings: Mapping[str, EmbeddingSharding[Any, Any, Any, Any]],
        device: torch.device,
    ) -> None:
        self._smallest: dict[str, BaseEmbeddingConfig] = {}  # by feature, of its stock tables
        for config in configs:
            if plan[config.name].sharding_type in FUSED_TYPES or config.use_virtual_table:
                continue
            for feature in config.feature_names:
                other = self._smallest.get(feature, config)
                self._smallest[feature] = min(config, other, key=lambda c: c.num_embeddings)
        self.any_tables = bool(self._smallest)
        no_limit = torch.iinfo(torch.int64).max
        limits = [
            no_limit
            if sharding_type == FUSED or feature not in self._smallest
            else self._smallest[feature].num_embeddings
            for sharding_type, sharding in shardings.items()
            for feature in sharding.feature_names()
        ]
        self._limits_S = torch.tensor(limits, device=device)
        self._checked_S = self._limits_S < no_limit

    def _bad_ids(self, batch: KeyedJaggedTensor) -> torch.Tensor:
        ids_N = batch.values()
        counts_S = to_device(batch.length_per_key(), ids_N.device)
        limits_N, checked_N = (
            values_S.repeat_interleave(counts_S, output_size=ids_N.numel())
            for values_S in (self._limits_S, self._checked_S)
        )
        return checked_N & ((ids_N < 0) | (ids_N >= limits_N))

    def bad(self, batch: KeyedJaggedTensor) -> torch.Tensor:
        """Returns whether any id is out of range, as a 0-dim tensor on the device."""
        return self._bad_ids(batch).any()

    def describe(self, batch: KeyedJaggedTensor) -> str:
        """Returns the error message for the first out-of-range id."""
        where = int(self._bad_ids(batch).nonzero()[0])
        ends = list(accumulate(batch.length_per_key()))
        slot = bisect_right(ends, where)
        config = self._smallest[batch.keys()[slot]]
        position = where - (ends[slot - 1] if slot else 0)
        return (
            f"feature {batch.keys()[slot]!r} of table {config.name!r}: id "
            f"{int(batch.values()[where])} at position {position} is out of range "
            f"[0, {config.num_embeddings})"
        )
