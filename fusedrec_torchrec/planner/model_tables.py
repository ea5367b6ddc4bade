"""The tables of a model as the cost model sees them, and a decision as a plan for the model."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from torch import nn
from torchrec.distributed.planner.types import ParameterConstraints
from torchrec.distributed.sharding_plan import (
    ParameterShardingGenerator,
    column_wise,
    data_parallel,
    row_wise,
    table_wise,
)
from torchrec.distributed.types import (
    EmbeddingModuleShardingPlan,
    ModuleSharder,
    ShardingPlan,
)
from torchrec.modules.embedding_modules import EmbeddingCollection

from fusedrec_torchrec.access.access_profile import AccessProfile
from fusedrec_torchrec.access.bag_counts import CountedBags
from fusedrec_torchrec.access.distinct_bags import BagsByChance
from fusedrec_torchrec.access.row_classes import RowClasses, RowPlaces
from fusedrec_torchrec.compat.optimizers import REPLICABLE, optimizer_of
from fusedrec_torchrec.planner.cost.table_load import TableLoad
from fusedrec_torchrec.planner.estimators import optimizer_bytes
from fusedrec_torchrec.planner.fit_tables import can_be_owned, configs_of, is_weighted
from fusedrec_torchrec.planner.search.decision import Decision
from fusedrec_torchrec.sharding.grid_options import GridOptions
from fusedrec_torchrec.sharding.plan_entries import (
    GridShardingPlan,
    fused_column_wise,
    fused_row_wise,
    fused_table_wise,
)
from fusedrec_torchrec.sharding.shardable_modules import shardable_modules
from fusedrec_torchrec.sharding.sharding_type import FUSED, FUSED_TABLE_WISE, OWNER_POOLED

__all__ = ["grid_options", "plan_of", "table_loads"]

Sharders = Sequence[ModuleSharder[nn.Module]]


def table_loads(
    model: nn.Module,
    sharders: Sharders,
    profile: AccessProfile | None = None,
    zipf: Mapping[str, float] | float | None = None,
    constraints: Mapping[str, ParameterConstraints] | None = None,
    poolings: Mapping[str, float] | None = None,
    scattered: bool = False,
) -> list[TableLoad]:
    """Returns what a model asks of its tables.

    Args:
        model: unsharded.
        sharders: of its modules.
        profile: how rows are used.
        zipf: exponent of a Zipf law that says so, for all or by table; uniform if neither.
        constraints: TorchRec's, for pooling factors where there is no profile.
        poolings: ids of a sample, by table; they go before.
        scattered: whether bags of these tables have one id and a Poisson number of others, as
            generated data has.

    Raises:
        ValueError: the profile is of other tables, or two tables have one name.
    """
    loads: dict[str, TableLoad] = {}
    known: dict[tuple[int, float], RowClasses] = {}
    for path, module, sharder in shardable_modules(model, sharders):
        default = (getattr(sharder, "fused_params", None) or {}).get("optimizer")
        configs = {config.name: config for config in configs_of(module)}
        for name, weight in sharder.shardable_parameters(module).items():
            if name in loads:
                raise ValueError(f"two tables have the name {name!r}; the planner needs one each")
            rows, dim = weight.shape
            features = len(configs[name].feature_names)
            mine = (constraints or {}).get(name)
            pooling = sum((mine and mine.pooling_factors) or [1.0] * features)
            bags: BagsByChance | CountedBags | None = None
            if profile is not None:  # which has counted what constraints only guess
                profile.check({name: rows})
                pooling = profile.accesses[name] / max(profile.samples, 1)
                bags = None if name in (poolings or {}) else profile.bags.get(name)
            pooling = (poolings or {}).get(name, pooling)
            optimizer = optimizer_of(weight, default)
            classes, places = _use(name, rows, profile, zipf, known)
            if scattered and bags is None:
                bags = BagsByChance(classes, pooling / features, features, scattered=True)
            loads[name] = TableLoad(
                name=name,
                rows=rows,
                dim=dim,
                pooling=pooling,
                classes=classes,
                places=places,
                bags=features,
                pooled=not isinstance(module, EmbeddingCollection),
                bag_use=bags,
                weighted=is_weighted(module),
                can_be_owned=can_be_owned(module, sharder, name),
                element_bytes=weight.element_size(),
                state_bytes=sum(optimizer_bytes(optimizer, 1, dim)),
                kind=f"{path} {weight.dtype} {optimizer}",
                # FBGEMM rounds fp16 at random on CUDA unless it is told not to.
                can_be_hot=optimizer in REPLICABLE and weight.element_size() == 4,
            )
    if profile is not None:
        profile.check({name: load.rows for name, load in loads.items()})
    return list(loads.values())


def _use(
    name: str,
    rows: int,
    profile: AccessProfile | None,
    zipf: Mapping[str, float] | float | None,
    known: dict[tuple[int, float], RowClasses],
) -> tuple[RowClasses, RowPlaces | None]:
    if profile is not None:
        if name not in profile.table_rows:
            profile.check({name: rows})
        return RowClasses.counted(profile, name), RowPlaces.counted(profile, name)
    exponent = zipf.get(name, 0.0) if isinstance(zipf, Mapping) else zipf or 0.0
    key = (rows, exponent)
    if key not in known:
        known[key] = RowClasses.zipf(rows, exponent) if exponent else RowClasses.uniform(rows)
    return known[key], None


def plan_of(decision: Decision, model: nn.Module, sharders: Sharders) -> ShardingPlan:
    """Returns the plan that a decision is, for a model with its tables."""
    number = {table.name: t for t, table in enumerate(decision.tables)}
    group = decision.groups
    local = min(group.local or decision.cluster.local_ranks, group.size)
    modules: dict[str, EmbeddingModuleShardingPlan] = {}
    for path, module, sharder in shardable_modules(model, sharders):
        plan = EmbeddingModuleShardingPlan()
        for name, weight in sharder.shardable_parameters(module).items():
            generate = _generator(decision, number[name])
            plan[name] = generate(weight, local, group.size, decision.cluster.device, sharder)
        modules[path] = plan
    if group.number > 1:
        return GridShardingPlan(dict(modules), group.size)
    return ShardingPlan(dict(modules))


def _generator(decision: Decision, t: int) -> ParameterShardingGenerator:
    system, table = decision.systems[t], decision.tables[t]
    kernel = "fused_uvm_caching" if decision.on_host[t] else "fused"
    if system == FUSED:
        rows = None
        if decision.ranges is not None:
            rows = np.diff(decision.ranges[t]).tolist()
        hot = decision.hot.get(table.name)
        return fused_row_wise(
            rows_per_rank=rows,
            compute_kernel=kernel,
            hot_rows=None if hot is None or not len(hot) else hot.tolist(),
            input_dist="exact_counts" if decision.exact_counts else "single_shot",
        )
    if system in OWNER_POOLED:
        own = decision.owners[t]
        given: dict[str, Any] = {
            "compute_kernel": kernel,
            "input_dist": "exact_counts" if decision.exact_counts else "single_shot",
        }
        whole = system == FUSED_TABLE_WISE
        return fused_table_wise(own[0], **given) if whole else fused_column_wise(own, **given)
    if system == "table_wise":
        return table_wise(rank=decision.owners[t][0], compute_kernel=kernel)
    if system == "row_wise":
        return row_wise(compute_kernel=kernel)
    if system == "data_parallel":
        return data_parallel()
    assert system == "column_wise", system
    return column_wise(ranks=list(range(decision.groups.size)), compute_kernel=kernel)


def grid_options(decision: Decision) -> GridOptions | None:
    """Returns the settings of 2D parallelism, if the decision is for it."""
    groups = decision.groups
    if groups.number == 1:
        return None
    settings: dict[str, Any] = {"sync": groups.sync, "layout": decision.layout}
    if groups.sync == "weights":
        settings["sync_every"] = groups.sync_every
    return GridOptions(sharding_group_size=groups.size, **settings)
