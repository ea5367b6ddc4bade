"""TorchRec's ``EmbeddingShardingPlanner`` that also plans fused tables."""

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch.distributed as dist
from torch import nn
from torchrec.distributed.collective_utils import invoke_on_rank_and_broadcast_result
from torchrec.distributed.comm import get_local_size
from torchrec.distributed.planner.constants import BATCH_SIZE
from torchrec.distributed.planner.planners import EmbeddingShardingPlanner
from torchrec.distributed.planner.types import (
    Enumerator,
    ParameterConstraints,
    Partitioner,
    PerfModel,
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
from fusedrec_torchrec.planner.cost.cluster import GB, ClusterConfig
from fusedrec_torchrec.planner.cost.step import STOCK
from fusedrec_torchrec.planner.enumerator import FusedEnumerator, unfit_tables
from fusedrec_torchrec.planner.estimators import FusedPerfEstimator, FusedStorageEstimator
from fusedrec_torchrec.planner.model_tables import plan_of, table_loads
from fusedrec_torchrec.planner.report.stats import FusedEmbeddingStats
from fusedrec_torchrec.planner.search.decide import decide
from fusedrec_torchrec.planner.search.decision import Decision
from fusedrec_torchrec.planner.search.search_config import SearchConfig
from fusedrec_torchrec.sharding.plan_entries import GridShardingPlan
from fusedrec_torchrec.sharding.sharders import fused_sharders
from fusedrec_torchrec.sharding.sharding_type import FUSED

__all__ = ["FusedShardingPlanner"]

KNOWN_CONSTRAINTS = ("sharding_types", "pooling_factors", "compute_kernels")


class FusedShardingPlanner(EmbeddingShardingPlanner):
    """Plans fused and stock tables together.

    Takes the arguments of TorchRec's ``EmbeddingShardingPlanner``; where enumerator and stats are
    not given, it uses ones that know ``fused_row_wise``.  Constraints work as in TorchRec, such
    as ``ParameterConstraints(sharding_types=["fused_row_wise"])``.

    With ``sharding_group_size`` it plans for 2D parallelism: for the ranks of one group, each of
    which holds 1 / sharding_group_size of the tables instead of 1 / ranks.

    With ``cluster``, a ``ClusterConfig``, its own cost model decides: per table fused or stock,
    ranges of rows, hot rows, groups.  ``search``, a ``SearchConfig``, says what may be decided,
    ``profile`` (an ``AccessProfile``) or ``zipf`` (an exponent) how rows are used; ``decision``
    then tells what was decided, on the rank that planned.  If TorchRec's parts are given, too
    (enumerator, proposer, partitioner, performance model, stats, callbacks), its own search runs
    with them, on the shardings that were decided.

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
        **kwargs: Any,
    ) -> None:
        sharding_group_size: int | None = kwargs.pop("sharding_group_size", None)
        self._model = _CostModel(
            cluster=kwargs.pop("cluster", None),
            search=kwargs.pop("search", None),
            profile=kwargs.pop("profile", None),
            zipf=kwargs.pop("zipf", None),
        )
        self.decision: Decision | None = None
        cluster = self._model.cluster
        if cluster is not None:
            if sharding_group_size is not None:
                raise ValueError(
                    "sharding_group_size and cluster are both given: with a cluster, "
                    "search.groups.sizes says which groups may be"
                )
            topology = topology or cluster.topology()
            if topology.world_size != cluster.ranks:
                raise ValueError(
                    f"topology.world_size is {topology.world_size}, must be cluster.ranks, "
                    f"{cluster.ranks}"
                )
            given = (enumerator, proposer, partitioner, performance_model, stats, callbacks)
            self._torchrec_searches = any(each is not None for each in given)
            self._reserves = storage_reservation is not None
        ranks = sharding_group_size or (topology.world_size if topology else dist.get_world_size())
        topology = topology or Topology(
            # Of a group, as GridModelParallel places it by default.
            local_world_size=max(get_local_size() * ranks // _all_ranks(ranks), 1),
            world_size=ranks,
            compute_device=get_device_type(),
        )
        if topology.world_size != ranks:
            raise ValueError(
                f"topology.world_size is {topology.world_size}, must be sharding_group_size, "
                f"{ranks}: a plan for 2D parallelism is for the ranks of one group"
            )
        self._sharding_group_size = sharding_group_size
        self._parts: dict[str, Any] = {
            "enumerator": enumerator,
            "storage_reservation": storage_reservation,
            "proposer": proposer,
            "partitioner": partitioner,
            "performance_model": performance_model,
            "stats": stats,
            "callbacks": callbacks,
            "debug": debug,
        }
        enumerator = enumerator or FusedEnumerator(
            topology=topology,
            batch_size=batch_size or BATCH_SIZE,
            constraints=constraints,
            estimator=[
                FusedPerfEstimator(topology, constraints),
                FusedStorageEstimator(topology, constraints),
            ],
        )
        super().__init__(
            topology=topology,
            batch_size=batch_size,
            enumerator=enumerator,
            storage_reservation=storage_reservation,
            proposer=proposer,
            partitioner=partitioner,
            performance_model=performance_model,
            stats=FusedEmbeddingStats() if stats is None else stats,
            constraints=constraints,
            debug=debug,
            callbacks=callbacks,
            **kwargs,
        )

    def plan(self, module: nn.Module, sharders: list[ModuleSharder[nn.Module]]) -> ShardingPlan:
        """As in TorchRec; with ``sharding_group_size``, a ``GridShardingPlan``."""
        if self._model.cluster is not None:
            return self._plan_by_cost(module, sharders)
        size = self._sharding_group_size
        if size is None:
            return super().plan(module, sharders)
        try:
            return GridShardingPlan(super().plan(module, sharders).plan, size)
        except PlannerError as error:
            raise PlannerError(
                f"no plan for a group of sharding_group_size {size} ranks, each of which holds its "
                f"share of all tables: try larger groups. {error}",
                error.error_type,
            ) from None

    def _plan_by_cost(
        self, module: nn.Module, sharders: list[ModuleSharder[nn.Module]]
    ) -> ShardingPlan:
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
        search = _constrained(model.search or SearchConfig(), constraints)
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
        """With the memory that the user's reservation leaves."""
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
        """TorchRec's search, with the user's parts of it, among what was decided."""
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
        for path, tables in plan.plan.items():
            decided = wanted.plan[path]
            assert isinstance(tables, dict) and isinstance(decided, dict)
            for name, sharding in tables.items():
                if sharding.sharding_type == FUSED:
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
        """As in TorchRec: rank 0 plans for all.  If it fails, all ranks raise what it raised."""
        pg = pg or dist.group.WORLD
        if pg is None:
            raise ValueError("pg is None and there is no default process group; use plan() instead")
        cluster = self._model.cluster
        if cluster is not None and cluster.ranks != pg.size():
            raise ValueError(
                f"cluster.ranks is {cluster.ranks}, must be the ranks of the process group, "
                f"{pg.size()}"
            )
        plan, error = invoke_on_rank_and_broadcast_result(
            pg, 0, self._plan_or_error, module, sharders or fused_sharders()
        )
        if error is not None:
            raise error
        return plan

    def _plan_or_error(
        self, module: nn.Module, sharders: list[ModuleSharder[nn.Module]]
    ) -> tuple[ShardingPlan | None, Exception | None]:
        try:
            return self.plan(module, sharders), None
        except Exception as error:
            # Planner errors carry objects that only exist on this rank: send their text.
            return None, RuntimeError(f"planning failed on rank 0: {error}")


@dataclass(frozen=True)
class _CostModel:
    cluster: ClusterConfig | None
    search: SearchConfig | None
    profile: AccessProfile | None
    zipf: Mapping[str, float] | float | None

    def __post_init__(self) -> None:
        for name in ("search", "profile", "zipf"):
            if self.cluster is None and getattr(self, name) is not None:
                raise ValueError(f"{name} is given without cluster, which the cost model needs")


def _constrained(
    search: SearchConfig, constraints: Mapping[str, ParameterConstraints]
) -> SearchConfig:
    """The search within TorchRec's constraints.

    Raises:
        ValueError: they contradict each other, or ask for what has no price.
    """
    tables: dict[str, Any] = dict(search.tables)
    usual = ParameterConstraints()
    for name, constraint in constraints.items():
        for field in dataclasses.fields(constraint):
            is_usual = getattr(constraint, field.name) == getattr(usual, field.name)
            if field.name not in KNOWN_CONSTRAINTS and not is_usual:
                raise ValueError(
                    f"constraints of table {name!r} set {field.name}, which the cost model does "
                    f"not know; it knows {', '.join(KNOWN_CONSTRAINTS)}.  Without cluster, "
                    "TorchRec's own search obeys it"
                )
        kernels = constraint.compute_kernels
        if kernels and not {"fused", "dense"} & set(kernels):
            raise ValueError(
                f"constraints of table {name!r} ask for compute_kernels {kernels}; the cost model "
                "takes fused, and host memory where devices are full.  Without cluster, TorchRec's "
                "own search obeys it"
            )
        asked = constraint.sharding_types
        if not asked:
            continue
        can = [FUSED, *STOCK]
        if not any(each in can for each in asked):
            raise ValueError(
                f"constraints of table {name!r} ask for {asked}, which the cost model has no price "
                f"for; it knows {can}.  Without cluster, TorchRec's estimators decide"
            )
        given = search.tables.get(name)
        both = [each for each in asked if each in can and (given is None or each in given)]
        if not both:
            raise ValueError(
                f"constraints of table {name!r} ask for {asked}, search.tables for {given}: they "
                "have nothing in common"
            )
        tables[name] = both
    return replace(search, tables=tables)


def _all_ranks(at_least: int) -> int:
    return max(dist.get_world_size(), at_least) if dist.is_initialized() else at_least
