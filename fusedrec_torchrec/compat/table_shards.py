"""How TorchRec describes tables that lie whole on a rank, or by columns on several."""

from typing import Any

from torchrec.distributed.embedding_sharding import EmbeddingShardingInfo
from torchrec.distributed.embedding_types import ShardedEmbeddingTable
from torchrec.distributed.sharding.cw_sharding import BaseCwEmbeddingSharding
from torchrec.distributed.sharding.tw_sharding import BaseTwEmbeddingSharding

__all__ = ["column_wise_shards", "table_wise_shards"]


def table_wise_shards(
    sharding: Any, infos: list[EmbeddingShardingInfo]
) -> list[list[ShardedEmbeddingTable]]:
    """Returns the shards of each rank as TorchRec's table-wise sharding would.

    Args:
        sharding: an ``EmbeddingSharding`` with environment and ranks.
        infos: the tables.
    """
    return BaseTwEmbeddingSharding._shard(sharding, infos)


def column_wise_shards(
    sharding: Any, infos: list[EmbeddingShardingInfo]
) -> list[list[ShardedEmbeddingTable]]:
    """Returns the shards of each rank as TorchRec's column-wise sharding would."""
    return BaseCwEmbeddingSharding._shard(sharding, infos)
