"""The sharding type this package adds to TorchRec.

TorchRec's own ``ShardingType`` is an Enum with members and cannot be extended; plans and
``DistributedModelParallel`` take any string, so the name lives in an Enum of its own.
"""

from enum import Enum, unique

__all__ = ["FUSED", "FusedShardingType"]


@unique
class FusedShardingType(Enum):
    """Sharding types of this package, next to TorchRec's ``ShardingType``."""

    FUSED_ROW_WISE = "fused_row_wise"


FUSED = FusedShardingType.FUSED_ROW_WISE.value
