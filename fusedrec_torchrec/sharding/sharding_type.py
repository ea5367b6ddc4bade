"""The sharding type this package adds to TorchRec.

TorchRec's own ``ShardingType`` is an Enum with members and cannot be extended; plans and
``DistributedModelParallel`` take any string, so the name lives in an Enum of its own.
"""

from enum import Enum, unique
from typing import Literal, get_args

__all__ = ["FUSED", "SHARDINGS", "FusedShardingType", "Sharding"]

# What configuration files and the command can say about the sharding of a table.
Sharding = Literal["fused_row_wise", "table_wise", "row_wise", "column_wise", "data_parallel"]
SHARDINGS: tuple[Sharding, ...] = get_args(Sharding)


@unique
class FusedShardingType(Enum):
    """Sharding types of this package, next to TorchRec's ``ShardingType``."""

    FUSED_ROW_WISE = "fused_row_wise"


FUSED = FusedShardingType.FUSED_ROW_WISE.value
