"""TorchRec's ``EmbeddingShardingPlanner`` that also plans fused tables."""

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import torch.distributed as dist
from torch import nn
from torchrec.distributed.comm import get_local_size
from torchrec.distributed.planner.constants import BATCH_SIZE
from torchrec.distributed.planner.planners import EmbeddingShardingPlanner
from torchrec.distributed.planner.types import (
    Enumerator,
    ParameterConstraints,
    Partitioner,
    PerfModel,
    PlanLoader,
    PlannerError,
    Proposer,
    ShardingOption,
    Stats,
    StorageReservation,
    Topology,
)
from torchrec.distributed.types import ModuleSharder, ShardingPlan
from torchrec.distributed.utils import get_device_type

from fusedrec_torchrec.access.access_profile import AccessProfile
from fusedrec_torchrec.core.all_ranks import on_first_rank
from fusedrec_torchrec.planner.bag_lengths import warn_of_unknown_bags
from fusedrec_torchrec.planner.columns_apart import move_columns_apart
from fusedrec_torchrec.planner.constraints import constrained_search
from fusedrec_torchrec.planner.cost.cluster import GB, ClusterConfig
from fusedrec_torchrec.planner.cost.table_load import TableLoad
from fusedrec_torchrec.planner.decided_options import decided_options
from fusedrec_torchrec.planner.enumerator import FusedEnumerator
from fusedrec_torchrec.planner.estimators import FusedPerfEstimator, FusedStorageEstimator
from fusedrec_torchrec.planner.fit_tables import unfit_tables
from fusedrec_torchrec.planner.model_tables import plan_of, table_loads
from fusedrec_torchrec.planner.report.stats import FusedEmbeddingStats
from fusedrec_torchrec.planner.search.decide import decide
from fusedrec_torchrec.planner.search.decision import Decision
from fusedrec_torchrec.planner.search.search_config import SearchConfig
from fusedrec_torchrec.planner.topology import topology_of
from fusedrec_torchrec.sharding.plan_entries import GridShardingPlan
from fusedrec_torchrec.sharding.sharders import fused_sharders
from fusedrec_torchrec.sharding.sharding_type import FUSED_TYPES

__all__ = ["FusedShardingPlanner"]


class FusedShardingPlanner(EmbeddingShardingPlanner):
    """Plans fused and stock tables.

    Takes the arguments of TorchRec's ``EmbeddingShardingPlanner``; where enumerator and stats are
    not given, it uses ones that know fused shardings.  Constraints work as in TorchRec, such
    as ``ParameterConstraints(sharding_types=["fused_row_wise"])``.

    Without ``cluster``, whoever sends fewer rows pools a fused table: its owner, if a batch has
    fewer distinct bags than distinct rows, or its requesters.  ``profile`` says how many there are;
    without it, ``pooling_factors`` of the constraints and a Zipf law do, and owners also pool
    tables with somewhat more bags than rows, since bags mostly repeat.  Without both every bag is
    taken to have one id, and a warning says so.  Tables that can be fused get a stock sharding only
    if constraints ask for nothing else.

    With ``sharding_group_size`` it plans for 2D parallelism: for the ranks of one group, each of
    which holds 1 / sharding_group_size of the tables instead of 1 / ranks.

    With ``cluster`` its own cost model decides: per table fused or stock, ranges of rows, hot rows,
    groups.  If TorchRec's parts are given, too (enumerator, proposer, partitioner, performance
    model, stats, callbacks), its own search runs with them, on the shardings that were decided.

    Args:
        sharding_group_size: ranks of a group; None if all ranks are one group.
        cluster: to plan for; None if TorchRec's estimators decide.
        search: what may be decided; needs ``cluster``.
        profile: how rows and bags are used; goes before ``pooling_factors`` of the constraints.
        zipf: exponent of a Zipf law that says how rows are used, for all tables or by table.

    Attributes:
        decision: what the cost model decided, on the rank that planned; None without ``cluster``.

    Example::

        planner = FusedShardingPlanner(topology=Topology(world_size=8, compute_device="cuda"))
        plan = planner.collective_plan(model, fused_sharders(), pg)
    """

    def __init__(
        self,
        topology: Topology | None = None,
        batch_size: int | None = None,
        enumerator: Enumerator | None = None,
        storage_reservation: StorageReservation | None = None,
        proposer: Proposer | list[Proposer] | None = None,
        partitioner: Partitioner | None = None,
        performance_model: PerfModel | None = None,
        stats: Stats | list[Stats] | None = None,
        constraints: dict[str, ParameterConstraints] | None = None,
        debug: bool = True,
        callbacks: list[Callable[[list[ShardingOption]], list[ShardingOption]]] | None = None,
        timeout_seconds: int | None = None,
        plan_loader: PlanLoader | None = None,
        *,
        sharding_group_size: int | None = None,
        cluster: ClusterConfig | None = None,
        search: SearchConfig | None = None,
        profile: AccessProfile | None = None,
        zipf: Mapping[str, float] | float | None = None,
    ) -> None:
        self._model = _CostModel(cluster, search, profile, zipf)
        self._sharding_group_size = sharding_group_size
        self.decision: Decision | None = None
        self._last: _Planned | None = None
        self._selected: list[ShardingOption] = []
        self._searched_by: FusedShardingPlanner | None = None  # of the decision's shardings
        topology = _topology(topology, sharding_group_size, cluster)
        given = (enumerator, proposer, partitioner, performance_model, stats, callbacks)
        self._torchrec_searches = any(component is not None for component in given)
        self._reserves = storage_reservation is not None
        self._parts: dict[str, Any] = {
            "enumerator": enumerator,
            "storage_reservation": storage_reservation,
            "proposer": proposer,
            "partitioner": partitioner,
            "performance_model": performance_model,
            "stats": stats,
            "callbacks": callbacks,
            "timeout_seconds": timeout_seconds,
            "plan_loader": plan_loader,
            "debug": debug,
        }
        known_loads: dict[str, TableLoad] = {}
        self._own_enumerator = enumerator or FusedEnumerator(
            topology=topology,
            batch_size=batch_size or BATCH_SIZE,
            constraints=constraints,
            estimator=[
                FusedPerfEstimator(topology, constraints, known_loads),
                FusedStorageEstimator(topology, constraints),
            ],
            profile=profile,
            zipf=zipf,
            known_loads=known_loads,
        )
        settings = {
            "enumerator": self._own_enumerator,
            "stats": FusedEmbeddingStats() if stats is None else stats,
            "callbacks": [*(callbacks or []), self._remember],
        }
        super().__init__(
            topology=topology,
            batch_size=batch_size,
            constraints=constraints,
            **{**self._parts, **settings},
        )

    def plan(self, module: nn.Module, sharders: list[ModuleSharder[nn.Module]]) -> ShardingPlan:
        """Returns a plan as TorchRec's planner; of one group if it plans for 2D parallelism."""
        self._last, self._selected, self._searched_by = None, [], None
        if self._model.profile is None:
            warn_of_unknown_bags(module, sharders, self._constraints)
        plan = self._plan(module, sharders)
        self._last = _Planned(module, sharders, plan)
        return plan

    def _plan(self, module: nn.Module, sharders: list[ModuleSharder[nn.Module]]) -> ShardingPlan:
        if self._model.cluster is not None:
            return self._plan_by_cost(module, sharders)
        size = self._sharding_group_size
        if size is None:
            return self._torchrecs_plan(module, sharders)
        try:
            return GridShardingPlan(self._torchrecs_plan(module, sharders).plan, size)
        except PlannerError as error:
            raise PlannerError(
                f"no plan for a group of sharding_group_size {size} ranks, each of which holds its "
                f"share of all tables: try larger groups. {error}",
                error.error_type,
            ) from None

    def _torchrecs_plan(
        self, module: nn.Module, sharders: list[ModuleSharder[nn.Module]]
    ) -> ShardingPlan:
        """Returns the plan of TorchRec's search, columns of fused tables on ranks that differ."""
        plan = super().plan(module, sharders)
        move_columns_apart(plan, self._topology)
        return plan

    def get_selected_options(self) -> list[ShardingOption]:
        """Returns the options of the last plan, with time and memory of all shards.

        TorchRec's unified planner (1.9) asks for them.  There are none on ranks that did not plan
        themselves.
        """
        if self._last is None or self.decision is None:
            return self._selected
        decided = decided_options(self.decision, *self._last)
        # What TorchRec's search decided, it has estimated; fused tables are as the decision says.
        searched = {o.name: o for o in self._selected if o.sharding_type not in FUSED_TYPES}
        return [searched.get(option.name, option) for option in decided]

    def get_search_space(self) -> list[ShardingOption] | None:
        """Returns the options that TorchRec's search chose from; None if it did not search.

        TorchRec's unified planner (1.9) asks for them.  The cost model lists no options.
        """
        if self._last is None or (self.decision is not None and not self._torchrec_searches):
            return None
        if self._searched_by is not None:
            return self._searched_by.get_search_space()
        return self._own_enumerator.enumerate(self._last.module, self._last.sharders)

    def _remember(self, options: list[ShardingOption]) -> list[ShardingOption]:
        """Keeps the options that TorchRec's search has selected."""
        self._selected = options
        return options

    def _plan_by_cost(
        self, module: nn.Module, sharders: list[ModuleSharder[nn.Module]]
    ) -> ShardingPlan:
        """Returns the plan that the cost model decides for."""
        model, constraints = self._model, self._constraints or {}
        cluster = model.cluster
        assert cluster is not None
        loads = table_loads(module, sharders, model.profile, model.zipf, constraints)
        unknown = sorted(set(constraints) - {load.name for load in loads})
        if unknown:
            raise ValueError(
                f"constraints name {unknown[0]!r}, which is no table; there are "
                f"{', '.join(load.name for load in loads[:20])}"
            )
        search = constrained_search(model.search or SearchConfig(), constraints)
        if self._reserves:
            cluster = self._reserved(cluster, module, sharders)
        unfit = unfit_tables(module, sharders, cluster.device)
        self.decision = decide(loads, self._batch_size, cluster, search, sorted(unfit))
        if self._torchrec_searches:
            return self._search_by_torchrec(module, sharders, self.decision)
        return plan_of(self.decision, module, sharders)

    def _reserved(
        self,
        cluster: ClusterConfig,
        module: nn.Module,
        sharders: list[ModuleSharder[nn.Module]],
    ) -> ClusterConfig:
        """Returns the cluster with the memory that the user's reservation leaves."""
        left = self._storage_reservation.reserve(
            topology=self._topology,
            batch_size=self._batch_size,
            module=module,
            sharders=sharders,
            constraints=self._constraints,
        )
        on_cuda = cluster.device == "cuda"
        free = min(d.storage.hbm if on_cuda else d.storage.ddr for d in left.devices)
        if free <= 0:
            raise ValueError(f"storage_reservation leaves {free / GB:.3g} GB for tables")
        return replace(cluster, memory=free / GB)

    def _search_by_torchrec(
        self,
        module: nn.Module,
        sharders: list[ModuleSharder[nn.Module]],
        decision: Decision,
    ) -> ShardingPlan:
        """Returns what TorchRec's search, with the user's parts of it, makes of the decision."""
        if decision.groups.number > 1:
            raise ValueError(
                "the decision is for 2D parallelism, which TorchRec's search cannot plan: leave "
                "out its parts, or search.groups"
            )
        wanted = plan_of(decision, module, sharders)
        planner = FusedShardingPlanner(
            topology=self._topology,
            batch_size=self._batch_size,
            constraints={
                table.name: dataclasses.replace(
                    (self._constraints or {}).get(table.name, ParameterConstraints()),
                    sharding_types=[system],
                )
                for table, system in zip(decision.tables, decision.systems, strict=True)
            },
            **self._parts,
        )
        plan = planner.plan(module, sharders)
        self._selected = planner.get_selected_options()
        self._searched_by = planner
        for path, tables in plan.plan.items():
            decided = wanted.plan[path]
            assert isinstance(tables, dict) and isinstance(decided, dict)
            for name, sharding in tables.items():
                if sharding.sharding_type in FUSED_TYPES:
                    tables[name] = dataclasses.replace(
                        decided[name], compute_kernel=sharding.compute_kernel
                    )
        return plan

    def collective_plan(
        self,
        module: nn.Module,
        sharders: list[ModuleSharder[nn.Module]] | None = None,
        pg: dist.ProcessGroup | None = None,
    ) -> ShardingPlan:
        """Returns the plan that rank 0 makes for all ranks, which all must call this.

        If rank 0 fails, all ranks raise what it raised.
        """
        pg = pg or dist.group.WORLD
        if pg is None:
            raise ValueError("pg is None and there is no default process group; use plan() instead")
        cluster = self._model.cluster
        if cluster is not None and cluster.ranks != pg.size():
            raise ValueError(
                f"cluster.ranks is {cluster.ranks}, must be the ranks of the process group, "
                f"{pg.size()}"
            )
        # Not by TorchRec's invoke_on_rank_and_broadcast_result: in 1.8 it broadcasts from a rank of
        # the world, so that it needs a group with rank 0.
        return on_first_rank(
            partial(self.plan, module, sharders or fused_sharders()), pg, carried=(Exception,)
        )


class _Planned(NamedTuple):
    """Holds the last plan and what it is for."""

    module: nn.Module
    sharders: list[ModuleSharder[nn.Module]]
    plan: ShardingPlan


@dataclass(frozen=True)
class _CostModel:
    """Holds what the cost model is given, in the planner's words."""

    cluster: ClusterConfig | None
    search: SearchConfig | None
    profile: AccessProfile | None
    zipf: Mapping[str, float] | float | None

    def __post_init__(self) -> None:
        if self.cluster is None and self.search is not None:
            raise ValueError("search is given without cluster, which the cost model needs")


def _topology(
    topology: Topology | None, sharding_group_size: int | None, cluster: ClusterConfig | None
) -> Topology:
    """Returns the ranks that a plan is for.

    Raises:
        ValueError: what is given contradicts itself.
    """
    if cluster is not None:
        if sharding_group_size is not None:
            raise ValueError(
                "sharding_group_size and cluster are both given: with a cluster, "
                "search.groups.sizes says which groups may be"
            )
        topology = topology or topology_of(cluster)
        if topology.world_size != cluster.ranks:
            raise ValueError(
                f"topology.world_size is {topology.world_size}, must be cluster.ranks, "
                f"{cluster.ranks}"
            )
    ranks = sharding_group_size or (topology.world_size if topology else dist.get_world_size())
    all_ranks = max(dist.get_world_size(), ranks) if dist.is_initialized() else ranks
    topology = topology or Topology(
        # Of a group, as GridModelParallel places it by default.
        local_world_size=max(get_local_size() * ranks // all_ranks, 1),
        world_size=ranks,
        compute_device=get_device_type(),
    )
    if topology.world_size != ranks:
        raise ValueError(
            f"topology.world_size is {topology.world_size}, must be sharding_group_size, "
            f"{ranks}: a plan for 2D parallelism is for the ranks of one group"
        )
    return topology
