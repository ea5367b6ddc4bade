"""TorchRec's printed planner statistics, with fused tables in them as ``FRW`` and so on."""

from copy import copy
from typing import Any

from torchrec.distributed.planner.stats import EmbeddingStats
from torchrec.distributed.planner.types import ShardingOption

from fusedrec_torchrec.compat.planner_stats import abbreviated
from fusedrec_torchrec.planner.enumerator import stock_name
from fusedrec_torchrec.planner.option_load import is_fused
from fusedrec_torchrec.sharding.sharding_type import FUSED, FUSED_COLUMN_WISE, FUSED_TABLE_WISE

__all__ = ["FusedEmbeddingStats"]

ABBREVIATIONS = {FUSED: "FRW", FUSED_TABLE_WISE: "FTW", FUSED_COLUMN_WISE: "FCW"}


class FusedEmbeddingStats(EmbeddingStats):
    """Is TorchRec's ``EmbeddingStats`` that knows fused shardings."""

    def log(self, *args: Any, **kwargs: Any) -> None:
        with abbreviated(ABBREVIATIONS):
            super().log(*args, **kwargs)

    def _get_shard_stats(
        self, shard: Any, sharding_option: ShardingOption, *args: Any, **kwargs: Any
    ) -> Any:
        if is_fused(sharding_option):  # sizes of input and output, without dedup, are stock ones
            sharding_option = copy(sharding_option)
            sharding_option.sharding_type = stock_name(sharding_option.sharding_type)
        return super()._get_shard_stats(shard, sharding_option, *args, **kwargs)
