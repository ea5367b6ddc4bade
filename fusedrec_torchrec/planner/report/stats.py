"""TorchRec's printed planner statistics, with fused tables in them as ``FRW`` and so on.

Below them stands for every fused table which of the fused shardings it has, and why.
"""

import logging
from collections.abc import Iterator, Mapping, Sequence
from copy import copy
from typing import Any

from torchrec.distributed.planner.stats import EmbeddingStats
from torchrec.distributed.planner.types import ParameterConstraints, ShardingOption

from fusedrec_torchrec.compat.planner_stats import abbreviated
from fusedrec_torchrec.planner.enumerator import FusedEnumerator, stock_name
from fusedrec_torchrec.planner.option_load import is_fused
from fusedrec_torchrec.planner.report.reasons import fewest_rows_travel, rows_and_bags
from fusedrec_torchrec.sharding.sharding_type import FUSED, FUSED_COLUMN_WISE, FUSED_TABLE_WISE

__all__ = ["FusedEmbeddingStats", "pooling_reasons"]

logger = logging.getLogger(__name__)

ABBREVIATIONS = {FUSED: "FRW", FUSED_TABLE_WISE: "FTW", FUSED_COLUMN_WISE: "FCW"}


def pooling_reasons(
    options: Sequence[ShardingOption],
    enumerator: FusedEnumerator,
    constraints: Mapping[str, ParameterConstraints],
) -> Iterator[str]:
    """Yields a line for each fused table that says how it is sharded, and why.

    Args:
        options: that were chosen.
        enumerator: that made them, and knows what is asked of the tables.
        constraints: by table.
    """
    fused = [option for option in options if is_fused(option)]
    if fused:
        law = "" if enumerator.knows_rows else ", if rows are used by a Zipf law"
        yield f"fused tables, by what travels for a batch of a rank{law}:"
    for option in fused:
        asked = constraints.get(option.name)
        why = _why(option, enumerator, bool(asked and asked.sharding_types))
        yield f"  {option.path}.{option.name}: {option.sharding_type}, {why}"


def _why(option: ShardingOption, enumerator: FusedEnumerator, constrained: bool) -> str:
    table, batch = enumerator.expected_load(option)
    if not table.pooled:
        return f"a sequence: {table.unique(batch):,.0f} distinct rows travel"
    fewest = fewest_rows_travel(option.sharding_type, table, batch)
    if fewest is not None and not constrained:
        return fewest
    reason = "constraints" if constrained else "memory, balance or all tables pooled by owners"
    return f"{reason}: {fewest or rows_and_bags(option.sharding_type, table, batch)}"


class FusedEmbeddingStats(EmbeddingStats):
    """Is TorchRec's ``EmbeddingStats`` that knows fused shardings."""

    def log(self, *args: Any, **kwargs: Any) -> None:
        with abbreviated(ABBREVIATIONS):
            super().log(*args, **kwargs)
        enumerator = kwargs.get("enumerator")
        if isinstance(enumerator, FusedEnumerator):
            constraints = kwargs.get("constraints") or {}
            for line in pooling_reasons(kwargs["best_plan"], enumerator, constraints):
                logger.info(line)

    def _get_shard_stats(
        self, shard: Any, sharding_option: ShardingOption, *args: Any, **kwargs: Any
    ) -> Any:
        if is_fused(sharding_option):  # sizes of input and output, without dedup, are stock ones
            sharding_option = copy(sharding_option)
            sharding_option.sharding_type = stock_name(sharding_option.sharding_type)
        return super()._get_shard_stats(shard, sharding_option, *args, **kwargs)
