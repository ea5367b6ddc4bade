"""What ranks must agree on about a module before it is sharded.

The key space, the sizes of messages and the updates of replicas follow from the tables, the plan
and the options; every rank works them out for itself.
"""

from collections.abc import Mapping, Sequence
from dataclasses import fields
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from itertools import accumulate
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torchrec.distributed.comm_ops import get_gradient_division
from torchrec.distributed.types import (
    EnumerableShardingSpec,
    ParameterSharding,
    ShardingEnv,
    ShardingEnv2D,
)
from torchrec.modules.embedding_configs import BaseEmbeddingConfig

from fusedrec_torchrec.compat.optimizers import optimizers_in_backward
from fusedrec_torchrec.core import native
from fusedrec_torchrec.core.fingerprint import Facts, check_same_on_all_ranks, facts_of

__all__ = ["check_agreement"]

PACKAGES = ("fusedrec_torchrec", "torch", "torchrec")
# What makes a table; how its weights are initialized is nobody else's business.
OF_TABLE = ("num_embeddings", "embedding_dim", "data_type", "pooling", "feature_names")


def check_agreement(
    module: nn.Module,
    configs: Sequence[BaseEmbeddingConfig],
    plan: Mapping[str, ParameterSharding],
    env: ShardingEnv,
    device: torch.device | None,
    path: str | None,
    settings: Mapping[str, Any],
) -> None:
    """Compares what ranks were given for a module; all ranks must call it.

    Args:
        module: before it is sharded.
        configs: its tables.
        plan: how each of them is sharded.
        env: ranks and process group.
        device: where tables and batches live.
        path: of the module in the model.
        settings: of the sharder, by name.

    Raises:
        ValueError: on all ranks, naming what differs on which of them.
    """
    device = device or torch.device("cpu")
    if env.process_group is None or device.type == "meta":
        return
    facts: Facts = {
        "module": f"{path or 'the model'} ({type(module).__name__})",
        **facts_of("version", {name: _version(name) for name in PACKAGES}),
        "version.operators": native.identity()[:12],
        "device": device.type,
        "gradient division": str(get_gradient_division()),
        "weighted": str(getattr(module, "is_weighted", lambda: False)()),
        "order of tables": ", ".join(config.name for config in configs),
    }
    for config in configs:
        about = {name: getattr(config, name, None) for name in OF_TABLE}
        facts |= facts_of(f"table {config.name!r}", about)
    for name, sharding in sorted(plan.items()):
        facts |= _facts_of_plan(name, sharding, _ranks_of(env))
    for name, parameter in module.named_parameters():
        classes, settings_in_backward = optimizers_in_backward(parameter)
        facts |= facts_of(f"optimizer of {name}", classes)
        for given in settings_in_backward:  # one dictionary for each optimizer; there is one
            facts |= facts_of(f"optimizer of {name}", given)
        facts[f"{name}.requires_grad"] = str(parameter.requires_grad)
    for name, value in settings.items():
        facts |= facts_of(name, value)
    what = f"module {path!r}" if path else "the model"
    check_same_on_all_ranks(what, facts, env.process_group, device)


@cache
def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:  # a source tree that is on the path
        return "not installed"


def _ranks_of(env: ShardingEnv) -> list[int]:
    """Returns the ranks that the plan is for: with 2D parallelism, those of this rank's group."""
    group = env.sharding_pg if isinstance(env, ShardingEnv2D) else env.process_group
    assert group is not None
    return dist.get_process_group_ranks(group)


def _facts_of_plan(table: str, sharding: ParameterSharding, ranks: list[int]) -> Facts:
    """Returns facts of a table's plan; ranks are numbered within the group that it is for."""
    number = {rank: i for i, rank in enumerate(ranks)}
    given = {field.name: getattr(sharding, field.name) for field in fields(sharding)}
    spec, planned_ranks = given.pop("sharding_spec"), given.pop("ranks")
    if isinstance(spec, EnumerableShardingSpec):
        given["ranks"] = [number.get(rank, rank) for rank in planned_ranks or []]
        name, shards = _shards(spec, number)
        given[name] = shards
    return facts_of(f"plan of table {table!r}", given)


def _shards(spec: EnumerableShardingSpec, number: Mapping[int, int]) -> tuple[str, object]:
    """Returns how the shards lie, and the name of that: rows, if they are row ranges in order."""
    ranks = [None if s.placement is None else s.placement.rank() for s in spec.shards]
    places = [None if rank is None else number.get(rank, rank) for rank in ranks]
    sizes = [list(shard.shard_sizes) for shard in spec.shards]
    offsets = [list(shard.shard_offsets) for shard in spec.shards]
    rows = [size[0] for size in sizes]
    starts = list(accumulate(rows, initial=0))[:-1]
    if places == list(range(len(places))) and offsets == [[start, 0] for start in starts]:
        return "rows_per_rank", rows
    shards = zip(sizes, offsets, places, strict=True)
    return "shards", [f"{size} from {at} on rank {place}" for size, at, place in shards]
