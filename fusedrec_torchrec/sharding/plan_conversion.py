"""A plan of TorchRec as a plan file, and a plan file as a plan for a model."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from torch import nn
from torchrec.distributed.types import (
    EmbeddingModuleShardingPlan,
    EnumerableShardingSpec,
    ModuleSharder,
    ParameterSharding,
    ShardingPlan,
    ShardMetadata,
)

from fusedrec_torchrec.access.hot_set import HotSet
from fusedrec_torchrec.codecs.options import Codecs
from fusedrec_torchrec.core.config import from_mapping, to_mapping
from fusedrec_torchrec.hot.options import HotRule
from fusedrec_torchrec.sharding.plan_entries import (
    FusedParameterSharding,
    GridShardingPlan,
    owner_shards,
    remote_devices,
)
from fusedrec_torchrec.sharding.plan_file import (
    Placed,
    PlanFile,
    TablePlan,
    digest_of,
    shards_of,
    written_shards,
)
from fusedrec_torchrec.sharding.shardable_modules import shardable_modules
from fusedrec_torchrec.sharding.sharding_type import FUSED_TYPES, OWNER_POOLED

__all__ = ["plan_file_of", "sharding_plan_of"]

NOT_WRITTEN = (
    *("cache_params", "enforce_hbm", "stochastic_rounding"),
    *("bounds_check_mode", "output_dtype", "key_value_params"),
)


@dataclass(frozen=True)
class _Found:
    """A table of a model."""

    module: str
    rows: int
    columns: int


def plan_file_of(
    plan: ShardingPlan,
    ranks: int,
    ranks_per_node: int,
    device: str,
    settings: Mapping[str, Any] | None = None,
) -> tuple[PlanFile, HotSet | None]:
    """Returns a plan as a file, and its hot rows.

    Args:
        plan: of a model.
        ranks: of all groups.
        ranks_per_node: of a group, on one node.
        device: where tables live.
        settings: other fields of the file.

    Raises:
        ValueError: two tables have one name.
    """
    tables: dict[str, TablePlan] = {}
    hot: dict[str, Sequence[int]] = {}
    group = plan.sharding_group_size if isinstance(plan, GridShardingPlan) else ranks
    given = dict(settings or {})
    for path, module in plan.plan.items():
        assert isinstance(module, EmbeddingModuleShardingPlan)
        for name, sharding in module.items():
            if name in tables:
                raise ValueError(
                    f"table {name!r} of {path!r} has the name of another table; a plan file needs "
                    "names that are all different"
                )
            table, ids = _table_plan(sharding, group)
            tables[name] = table
            if ids:
                hot[name] = ids
            if isinstance(sharding, FusedParameterSharding) and sharding.input_dist:
                given.setdefault("input_dist", sharding.input_dist)
    hot_set = None
    if hot:
        rows = {name: table.rows for name, table in tables.items()}
        hot_set = HotSet(rows, {name: np.array(ids, np.int64) for name, ids in hot.items()})
        given["hot_digest"] = digest_of(hot_set)
    data = {
        "ranks": ranks,
        "ranks_per_node": ranks_per_node,
        "device": device,
        **given,
        "tables": {name: to_mapping(table) for name, table in tables.items()},
    }
    return from_mapping(PlanFile, data, "plan"), hot_set


def _table_plan(sharding: ParameterSharding, ranks: int) -> tuple[TablePlan, Sequence[int]]:
    for name in NOT_WRITTEN:
        if getattr(sharding, name) is not None:
            raise ValueError(
                f"the plan sets {name}, {getattr(sharding, name)}, which a plan file has no place "
                "for; set it in fused_params of the sharders"
            )
    spec = sharding.sharding_spec
    given: dict[str, Any] = {
        "sharding": sharding.sharding_type,
        "kernel": sharding.compute_kernel,
        "ranks": None if sharding.ranks in (None, list(range(ranks))) else sharding.ranks,
    }
    hot: Sequence[int] = ()
    if isinstance(sharding, FusedParameterSharding) and sharding.hot_rows is not None:
        rule = sharding.hot_rows
        hot = rule.ids or ()
        given["hot_rows"] = len(hot)
        if rule.ids is None:
            given["hot_rule"] = asdict(rule)
    if isinstance(sharding, FusedParameterSharding) and isinstance(sharding.codecs, Codecs):
        given["codecs"] = sharding.codecs
    if not isinstance(spec, EnumerableShardingSpec):
        # Replicated on all ranks: the sizes are the model's.
        return TablePlan(rows=0, columns=0, **given), hot
    places = [(tuple(s.shard_offsets), tuple(s.shard_sizes)) for s in spec.shards]
    rows = max(offset[0] + size[0] for offset, size in places)
    columns = max(offset[1] + size[1] for offset, size in places)
    return TablePlan(
        rows=rows, columns=columns, **given, **written_shards(places, rows, columns)
    ), hot


def sharding_plan_of(
    file: PlanFile,
    hot_set: HotSet | None,
    model: nn.Module,
    sharders: Sequence[ModuleSharder[nn.Module]],
    source: str = "plan",
) -> ShardingPlan:
    """Returns the plan of a file, for a model.

    Raises:
        ValueError: the model has other tables.
    """
    tables = _tables_of(model, sharders)
    file.check_tables(tables, source)
    ranks = file.ranks if file.grid is None else file.grid.sharding_group_size
    modules: dict[str, EmbeddingModuleShardingPlan] = {}
    for name, table in tables.items():
        plan = file.tables[name]
        if plan.rows and (plan.rows, plan.columns) != (table.rows, table.columns):
            raise ValueError(
                f"{source} plans table {name!r} with {plan.rows} x {plan.columns}, the model's has "
                f"{table.rows} x {table.columns}: plan again"
            )
        sharding = _sharding(name, plan, table, file, hot_set, ranks)
        modules.setdefault(table.module, EmbeddingModuleShardingPlan())[name] = sharding
    if file.grid is not None:
        return GridShardingPlan(dict(modules), ranks)
    return ShardingPlan(dict(modules))


def _tables_of(model: nn.Module, sharders: Sequence[ModuleSharder[nn.Module]]) -> dict[str, _Found]:
    return {
        name: _Found(path, *weight.shape)
        for path, module, sharder in shardable_modules(model, sharders)
        for name, weight in sharder.shardable_parameters(module).items()
    }


def _sharding(
    name: str, plan: TablePlan, table: _Found, file: PlanFile, hot_set: HotSet | None, ranks: int
) -> ParameterSharding:
    places = shards_of(name, plan, table.rows, table.columns, ranks)
    on_ranks = list(range(ranks)) if plan.ranks is None else plan.ranks
    spec = None
    if places is not None:
        devices = remote_devices(file.device, ranks, file.ranks_per_node)
        shards = [ShardMetadata(list(o), list(size), devices[rank]) for rank, o, size in places]
        spec = EnumerableShardingSpec(shards)
    given: dict[str, Any] = {
        "sharding_type": plan.sharding,
        "compute_kernel": plan.kernel,
        "ranks": on_ranks,
        "sharding_spec": spec,
    }
    if plan.sharding not in FUSED_TYPES:
        return ParameterSharding(**given)
    rule = plan.hot_rule
    if hot_set is not None and len(hot_set.ids.get(name, ())):
        rule = HotRule(ids=tuple(hot_set.ids[name].tolist()))
    if plan.sharding in OWNER_POOLED:
        _check_owner_pooled(name, plan, table, places or [], ranks)
        if rule is not None:
            raise ValueError(f"tables.{name} is {plan.sharding} with hot rows, must have none")
    return FusedParameterSharding(
        **given, hot_rows=rule, input_dist=file.input_dist, codecs=plan.codecs
    )


def _check_owner_pooled(
    name: str, plan: TablePlan, table: _Found, places: Sequence[Placed], ranks: int
) -> None:
    """Refuses shards that a table which its owners pool cannot have."""
    on_ranks = [place[0] for place in places]
    try:
        wanted = owner_shards(plan.sharding, table.rows, table.columns, on_ranks, ranks)
    except ValueError as error:
        raise ValueError(f"tables.{name}: {error}") from None
    if [place[1:] for place in places] != wanted:
        raise ValueError(f"tables.{name} is {plan.sharding}, its shards must be equal columns")
