"""TorchRec's ``EmbeddingShardingPlanner`` that also plans fused tables."""

from collections.abc import Callable
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

from fusedrec_torchrec.planner.enumerator import FusedEnumerator
from fusedrec_torchrec.planner.estimators import FusedPerfEstimator, FusedStorageEstimator
from fusedrec_torchrec.planner.stats import FusedEmbeddingStats
from fusedrec_torchrec.sharders import fused_sharders
from fusedrec_torchrec.sharding_plan import GridShardingPlan

__all__ = ["FusedShardingPlanner"]


class FusedShardingPlanner(EmbeddingShardingPlanner):
    """Plans fused and stock tables together.

    Takes the arguments of TorchRec's ``EmbeddingShardingPlanner``; where enumerator and stats are
    not given, it uses ones that know ``fused_row_wise``.  Constraints work as in TorchRec, such
    as ``ParameterConstraints(sharding_types=["fused_row_wise"])``.

    With ``sharding_group_size`` it plans for 2D parallelism: for the ranks of one group, each of
    which holds 1 / sharding_group_size of the tables instead of 1 / ranks.

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


def _all_ranks(at_least: int) -> int:
    return max(dist.get_world_size(), at_least) if dist.is_initialized() else at_least
