"""TorchRec's printed planner statistics, with fused tables in them as ``FRW``."""

from copy import copy
from typing import Any

from torchrec.distributed.planner.stats import EmbeddingStats
from torchrec.distributed.planner.types import ShardingOption

from fusedrec_torchrec.compat.planner_stats import abbreviated
from fusedrec_torchrec.planner.enumerator import FUSED_AS_ROW_WISE, is_fused
from fusedrec_torchrec.sharding.sharding_type import FUSED

__all__ = ["FusedEmbeddingStats"]

ABBREVIATION = "FRW"


class FusedEmbeddingStats(EmbeddingStats):
    """Is TorchRec's ``EmbeddingStats`` that knows ``fused_row_wise``."""

    def log(self, *args: Any, **kwargs: Any) -> None:
        with abbreviated(FUSED, ABBREVIATION):
            super().log(*args, **kwargs)

    def _get_shard_stats(
        self, shard: Any, sharding_option: ShardingOption, *args: Any, **kwargs: Any
    ) -> Any:
        if is_fused(sharding_option):  # sizes of input and output, without dedup, are row-wise's
            sharding_option = copy(sharding_option)
            sharding_option.sharding_type = FUSED_AS_ROW_WISE
        return super()._get_shard_stats(shard, sharding_option, *args, **kwargs)
