"""The sharding plan of a run, written down for people and for ``fusedrec inspect``."""

from pathlib import Path
from typing import Any

import yaml
from torchrec.distributed.types import EnumerableShardingSpec, ShardingPlan

__all__ = ["plan_as_data", "write_plan"]


def plan_as_data(plan: ShardingPlan) -> dict[str, Any]:
    """The plan as plain data: module, table, sharding and where each shard lives."""
    return {
        module: {
            table: {
                "sharding_type": sharding.sharding_type,
                "compute_kernel": sharding.compute_kernel,
                "ranks": sharding.ranks,
                "shards": _shards(sharding.sharding_spec),
            }
            for table, sharding in tables.items()  # type: ignore[attr-defined]
        }
        for module, tables in plan.plan.items()
    }


def _shards(spec: Any) -> list[dict[str, Any]] | None:
    if not isinstance(spec, EnumerableShardingSpec):
        return None  # replicated on all ranks
    return [
        {
            "placement": str(shard.placement),
            "offsets": list(shard.shard_offsets),
            "sizes": list(shard.shard_sizes),
        }
        for shard in spec.shards
    ]


def write_plan(path: Path, plan: ShardingPlan) -> None:
    path.write_text(yaml.safe_dump({"plan": plan_as_data(plan)}, sort_keys=False))
