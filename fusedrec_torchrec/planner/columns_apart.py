"""Moves column shards of a fused table to ranks that differ from each other.

TorchRec's partitioner places the shards of a table one by one, each on the rank that has the least
to do.  Two of them may meet on a rank, which the fused exchange does not allow.
"""

import math
from collections.abc import Iterable

from torchrec.distributed.planner.types import Topology
from torchrec.distributed.types import (
    EmbeddingModuleShardingPlan,
    EnumerableShardingSpec,
    ParameterSharding,
    ShardingPlan,
)

from fusedrec_torchrec.sharding.plan_entries import remote_devices
from fusedrec_torchrec.sharding.sharding_type import FUSED_COLUMN_WISE

__all__ = ["move_columns_apart"]


def move_columns_apart(plan: ShardingPlan, topology: Topology) -> None:
    """Moves all but one of the shards that a fused table has on a rank.

    Each goes to the rank with the fewest weights among those without columns of the table.

    Args:
        plan: is changed.
        topology: that it was made for.
    """
    ranks, local = topology.world_size, topology.local_world_size
    devices = remote_devices(topology.compute_device, ranks, local)
    entries = [
        entry
        for tables in plan.plan.values()
        if isinstance(tables, EmbeddingModuleShardingPlan)
        for entry in tables.values()
    ]
    weights_W = _weights_of_ranks(entries, ranks)
    for entry in entries:
        if entry.sharding_type != FUSED_COLUMN_WISE:
            continue
        spec = entry.sharding_spec
        assert entry.ranks is not None and isinstance(spec, EnumerableShardingSpec)
        own: list[int] = []
        for shard, placed in zip(spec.shards, entry.ranks, strict=True):
            rank = placed
            if placed in own:
                taken = {*own, *entry.ranks}
                free = [other for other in range(ranks) if other not in taken]
                rank = min(free, key=weights_W.__getitem__)
                weights_W[placed] -= math.prod(shard.shard_sizes)
                weights_W[rank] += math.prod(shard.shard_sizes)
                shard.placement = devices[rank]
            own.append(rank)
        entry.ranks = own


def _weights_of_ranks(entries: Iterable[ParameterSharding], ranks: int) -> list[int]:
    """Returns how many weights the shards of each rank have."""
    weights_W = [0] * ranks
    for entry in entries:
        spec = entry.sharding_spec
        if not isinstance(spec, EnumerableShardingSpec) or entry.ranks is None:
            continue  # on all ranks alike
        for shard, rank in zip(spec.shards, entry.ranks, strict=True):
            weights_W[rank] += math.prod(shard.shard_sizes)
    return weights_W
