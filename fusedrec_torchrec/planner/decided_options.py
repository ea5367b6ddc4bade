"""A decision of the cost model as the sharding options that TorchRec's tools read.

The cost model prices a step as a whole.  Here every table gets its share of each stage of the step,
as much as it has of the stage's bytes or ids, and of fixed costs as much as any other table.  Times
of all shards are those of all ranks: a table that is on one rank has there what it costs on others.
Memory is that of the shard's rank; outputs of a table on ranks without a shard are in no option.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from torch import nn
from torchrec.distributed.planner.types import (
    PartitionByType,
    Perf,
    Shard,
    ShardingOption,
    Storage,
)
from torchrec.distributed.types import ModuleSharder, ParameterSharding, ShardingPlan

from fusedrec_torchrec.planner.cost.memory import (
    buffer_bytes,
    owner_bytes,
    replica_bytes,
    table_bytes_W,
)
from fusedrec_torchrec.planner.cost.stages import HOT_SYNC
from fusedrec_torchrec.planner.cost.step import HotUse, Stage
from fusedrec_torchrec.planner.fit_tables import configs_of
from fusedrec_torchrec.planner.search.decision import Decision
from fusedrec_torchrec.sharding.shardable_modules import shardable_modules
from fusedrec_torchrec.sharding.sharding_type import OWNER_POOLED

__all__ = ["decided_options"]

KINDS = ("fwd_compute", "fwd_comms", "bwd_compute", "bwd_comms", "input_dist_comms")
INPUT_DIST = ("counts", "splits", "lengths", "ids")
BACKWARD = ("pooling_backward", "gradients", "update", "bag_update", "update_ids", "update_on_host")
SYNC = (HOT_SYNC, "sync_")  # how stages begin that follow the backward pass
BY_SHARD = ("table_wise", "column_wise", *OWNER_POOLED)  # whose shards TorchRec places one by one
MILLISECOND = 1e-3  # TorchRec's unit of time
Floats = NDArray[np.float64]


def decided_options(
    decision: Decision,
    model: nn.Module,
    sharders: Sequence[ModuleSharder[nn.Module]],
    plan: ShardingPlan,
) -> list[ShardingOption]:
    """Returns the option of every table, with time and memory of its shards.

    Args:
        decision: that was made.
        model: that it is for.
        sharders: of its modules.
        plan: that the decision became; in 2D, of one group.
    """
    number = {table.name: t for t, table in enumerate(decision.tables)}
    perf = _perf(decision)
    options = []
    for path, module, sharder in shardable_modules(model, sharders):
        features = {config.name: config.feature_names for config in configs_of(module)}
        shardings = plan.plan[path]
        for name, weight in sharder.shardable_parameters(module).items():
            t = number[name]
            table = decision.tables[t]
            sharding = shardings[name]
            shards = _shards(sharding, list(weight.shape), decision.groups.size)
            for shard in shards:
                assert shard.rank is not None
                shard.storage = _storage(decision, t, shard.rank)
                shard.perf = Perf(**{kind: float(ms[shard.rank]) for kind, ms in perf[t].items()})
            by = PartitionByType.DEVICE if sharding.sharding_type in BY_SHARD else None
            options.append(
                ShardingOption(
                    name=name,
                    tensor=weight,
                    module=(path, module),
                    input_lengths=[table.pooling / table.bags] * len(features[name]),
                    batch_size=decision.batch,
                    sharding_type=sharding.sharding_type,
                    partition_by=(by or PartitionByType.UNIFORM).value,
                    compute_kernel=sharding.compute_kernel,
                    shards=shards,
                    is_pooled=table.pooled,
                    feature_names=list(features[name]),
                )
            )
    return options


def _shards(sharding: ParameterSharding, shape: list[int], ranks: int) -> list[Shard]:
    """Returns the shards of a table without their costs."""
    spec = sharding.sharding_spec
    if spec is None:  # data-parallel
        return [Shard(size=shape, offset=[0, 0], rank=rank) for rank in range(ranks)]
    return [
        Shard(size=shard.shard_sizes, offset=shard.shard_offsets, rank=shard.placement.rank())
        for shard in spec.shards
    ]


def _storage(decision: Decision, t: int, rank: int) -> Storage:
    """Returns the memory that a table takes on a rank that has a shard of it."""
    table, system, ranks = decision.tables[t], decision.systems[t], decision.groups.size
    weights = float(table_bytes_W(table, decision.placement(t), ranks)[rank])
    other = buffer_bytes(table, system, decision.batch, ranks)
    own = decision.owners[t]
    if own:
        other += owner_bytes(table, decision.batch, ranks, system, len(own))
    hot = len(decision.hot.get(table.name, ()))
    other += replica_bytes([table], HotUse(np.array([hot])))
    if decision.cluster.device != "cuda":
        return Storage(hbm=0, ddr=round(weights + other))
    if decision.on_host[t]:
        return Storage(hbm=round(other), ddr=round(weights))
    return Storage(hbm=round(weights + other), ddr=0)


def _perf(decision: Decision) -> list[dict[str, Floats]]:
    """Returns the milliseconds of each table on each rank, by TorchRec's kinds of work."""
    cluster = decision.cluster
    perf = [{kind: np.zeros(decision.groups.size) for kind in KINDS} for _ in decision.tables]
    for step, numbers in zip(decision.steps, decision.numbers_of_steps, strict=True):
        alone = [
            {stage.name: stage for stage in decision.alone(t).steps[0].stages} for t in numbers
        ]
        rates = step.rates(cluster)
        for t in numbers:
            perf[t]["fwd_compute"] += step.overhead(cluster) / len(numbers) / MILLISECOND
        for stage in step.stages:
            amount_TW = np.stack(
                [p[stage.name].amount_W if stage.name in p else 0 * stage.amount_W for p in alone]
            )
            total_W = amount_TW.sum(0)
            even = np.full_like(amount_TW, 1 / len(numbers))
            shares_TW = np.divide(amount_TW, total_W, out=even, where=total_W > 0)
            spent_TW = shares_TW * stage.seconds_W(cluster, rates) / MILLISECOND
            for t, spent_W in zip(numbers, spent_TW, strict=True):
                own = list(decision.owners[t])
                if own:
                    perf[t][_kind(stage)][own] += spent_W.sum() / len(own)
                else:
                    perf[t][_kind(stage)] += spent_W
    return perf


def _kind(stage: Stage) -> str:
    """Returns what TorchRec calls a stage of a step."""
    backward = stage.name in BACKWARD or stage.name.startswith(SYNC)
    if not stage.is_collective:
        return "bwd_compute" if backward else "fwd_compute"
    if stage.name in INPUT_DIST:
        return "input_dist_comms"
    return "bwd_comms" if backward else "fwd_comms"
