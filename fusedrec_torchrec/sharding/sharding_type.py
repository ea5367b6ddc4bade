"""The sharding types this package adds to TorchRec.

TorchRec's own ``ShardingType`` is an Enum with members and cannot be extended; plans and
``DistributedModelParallel`` take any string, so the names live in an Enum of their own.

They differ in where a table lives, and so in where its bags are pooled.  All fused tables of a
module share one exchange, whatever their types.
"""

from enum import Enum, unique
from typing import Literal, get_args

__all__ = [
    "FUSED",
    "FUSED_COLUMN_WISE",
    "FUSED_TABLE_WISE",
    "FUSED_TYPES",
    "LOOKS_LIKE",
    "OWNER_POOLED",
    "SHARDINGS",
    "FusedShardingType",
    "Sharding",
    "StockSharding",
]

# TorchRec's own.
StockSharding = Literal["table_wise", "row_wise", "column_wise", "data_parallel"]
# What configuration files and the command can say about the sharding of a table.
Sharding = Literal["fused_row_wise", "fused_table_wise", "fused_column_wise", StockSharding]
SHARDINGS: tuple[Sharding, ...] = get_args(Sharding)


@unique
class FusedShardingType(Enum):
    """Sharding types of this package, next to TorchRec's ``ShardingType``."""

    FUSED_ROW_WISE = "fused_row_wise"
    """Rows are split over all ranks; distinct rows travel, and the requester pools them."""
    FUSED_TABLE_WISE = "fused_table_wise"
    """A table is on one rank, which pools; one row for each distinct bag travels."""
    FUSED_COLUMN_WISE = "fused_column_wise"
    """The columns of a table are on several ranks, each of which pools its own."""


FUSED = FusedShardingType.FUSED_ROW_WISE.value
FUSED_TABLE_WISE = FusedShardingType.FUSED_TABLE_WISE.value
FUSED_COLUMN_WISE = FusedShardingType.FUSED_COLUMN_WISE.value
OWNER_POOLED = (FUSED_TABLE_WISE, FUSED_COLUMN_WISE)
FUSED_TYPES = (FUSED, *OWNER_POOLED)
# TorchRec's sharding whose shards look the same, for where it asks by name how a table lies.
LOOKS_LIKE = {
    FUSED: "row_wise",
    FUSED_TABLE_WISE: "table_wise",
    FUSED_COLUMN_WISE: "column_wise",
}
