"""TorchRec's printed planner statistics, with fused tables in them as ``FRW``."""

from collections.abc import Iterator
from contextlib import contextmanager
from copy import copy
from typing import Any

from torchrec.distributed.planner import stats as torchrec_stats
from torchrec.distributed.planner.stats import EmbeddingStats
from torchrec.distributed.planner.types import ShardingOption

from fusedrec_torchrec.planner.enumerator import FUSED_AS_ROW_WISE, is_fused
from fusedrec_torchrec.sharding.sharding_type import FUSED

__all__ = ["FusedEmbeddingStats"]

ABBREVIATION = "FRW"


@contextmanager
def _fused_abbreviation() -> Iterator[None]:
    """Teaches TorchRec's statistics the abbreviation of fused tables for a while.

    HACK: TorchRec abbreviates sharding types in a module function that knows only its own.  It can
    go when TorchRec falls back to the type's own name there.
    """
    original = torchrec_stats._get_sharding_type_abbr
    torchrec_stats._get_sharding_type_abbr = lambda sharding_type: (
        ABBREVIATION if sharding_type == FUSED else original(sharding_type)
    )
    try:
        yield
    finally:
        torchrec_stats._get_sharding_type_abbr = original


class FusedEmbeddingStats(EmbeddingStats):
    """Is TorchRec's ``EmbeddingStats`` that knows ``fused_row_wise``."""

    def log(self, *args: Any, **kwargs: Any) -> None:
        with _fused_abbreviation():
            super().log(*args, **kwargs)

    def _get_shard_stats(
        self, shard: Any, sharding_option: ShardingOption, *args: Any, **kwargs: Any
    ) -> Any:
        if is_fused(sharding_option):  # sizes of input and output, without dedup, are row-wise's
            sharding_option = copy(sharding_option)
            sharding_option.sharding_type = FUSED_AS_ROW_WISE
        return super()._get_shard_stats(shard, sharding_option, *args, **kwargs)
