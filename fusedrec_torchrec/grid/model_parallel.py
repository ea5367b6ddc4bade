"""``GridModelParallel``: 2D sparse parallelism for fused and stock tables, on CPU and CUDA.

Tables are sharded over the ranks of a group, and each group is a replica of the others
("Two-dimensional sparse parallelism", Meta, 2025).  TorchRec's ``DMPCollection`` does the same on
CUDA only, and syncs whole shards.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torchrec.distributed.comm import get_local_size
from torchrec.distributed.embedding_types import EmbeddingComputeKernel, ShardedEmbeddingModule
from torchrec.distributed.model_parallel import DataParallelWrapper
from torchrec.distributed.planner.types import Topology
from torchrec.distributed.types import (
    ModuleSharder,
    ShardingPlan,
    ShardingType,
)
from torchrec.optim.keyed import CombinedOptimizer

from fusedrec_torchrec.compat.dmp_collection import AnyDeviceDMPCollection
from fusedrec_torchrec.compat.momentum_scale import (
    resolve_parameters,
    resolve_sharder,
    scale_lookups,
)
from fusedrec_torchrec.core.fingerprint import check_same_on_all_ranks, facts_of
from fusedrec_torchrec.grid.env import GridShardingEnv
from fusedrec_torchrec.grid.groups import Groups
from fusedrec_torchrec.grid.sync import Replicas, replicas_of
from fusedrec_torchrec.planner.planner import FusedShardingPlanner
from fusedrec_torchrec.sharding.grid_options import GridOptions
from fusedrec_torchrec.sharding.plan_entries import GridShardingPlan
from fusedrec_torchrec.sharding.sharders import fused_sharders
from fusedrec_torchrec.sharding.sharding_type import FUSED_TYPES

__all__ = ["GridModelParallel"]

KERNELS = [
    EmbeddingComputeKernel.FUSED.value,
    EmbeddingComputeKernel.FUSED_UVM.value,
    EmbeddingComputeKernel.FUSED_UVM_CACHING.value,
]


class GridModelParallel(AnyDeviceDMPCollection):
    """``DistributedModelParallel`` over groups of ranks.

    Call ``sync()`` after every training step; TorchRec's ``TrainPipelineSparseDist`` does it by
    itself, most other pipelines do not.
    Dense parameters and data-parallel tables are data-parallel over all ranks.

    Args:
        module: the model.
        grid: groups and syncs.
        device: where the model lives.
        plan: for the ranks 0, 1, ... of a group; if None, a ``FusedShardingPlanner`` makes it.
        sharders: ``fused_sharders()`` if None.
        init_data_parallel, init_parameters, data_parallel_wrapper: as in TorchRec.

    Example::

        model = fr.GridModelParallel(model, fr.GridOptions(sharding_group_size=8))
        pipeline = TrainPipelineSparseDist(model, optimizer, device)
    """

    def __init__(
        self,
        module: nn.Module,
        grid: GridOptions,
        device: torch.device | None = None,
        plan: ShardingPlan | None = None,
        sharders: list[ModuleSharder[nn.Module]] | None = None,
        init_data_parallel: bool = True,
        init_parameters: bool = True,
        data_parallel_wrapper: DataParallelWrapper | None = None,
    ) -> None:
        everyone = dist.group.WORLD
        if everyone is None:
            raise ValueError("there is no default process group: call init_process_group first")
        if not isinstance(grid, GridOptions):
            raise ValueError(f"grid is {grid!r}, must be GridOptions(sharding_group_size=...)")
        device = device or torch.device("cpu")
        check_same_on_all_ranks("GridOptions", facts_of("grid", grid), everyone, device)
        size = grid.sharding_group_size
        ranks = dist.get_world_size()
        groups = grid.groups(ranks)
        ranks_per_host = grid.ranks_per_host(ranks, min(get_local_size(), ranks))
        # With shared gradients, v is what it is without groups.
        scale = groups if grid.sync == "weights" else 1
        resolve_parameters(module, scale)
        sharders = [resolve_sharder(sharder, scale) for sharder in sharders or fused_sharders()]
        if isinstance(plan, GridShardingPlan) and plan.sharding_group_size != size:
            raise ValueError(
                f"sharding_group_size is {size}, but the plan was made for groups of "
                f"{plan.sharding_group_size} ranks"
            )
        if plan is None:
            topology = Topology(
                world_size=size, local_world_size=ranks_per_host, compute_device=device.type
            )
            planner = FusedShardingPlanner(topology, sharding_group_size=size)
            plan = planner.collective_plan(module, sharders, everyone)
        _check_plan(plan, grid)
        self._groups = Groups.create(grid, device)
        placed = self._groups.place(plan)
        env = GridShardingEnv(
            grid,
            global_pg=everyone,
            sharding_pg=self._groups.sharding_pg,
            replica_pg=self._groups.replica_pg,
            device_mesh=self._groups.mesh,
            node_group_size=ranks_per_host,
            use_inter_host_allreduce=grid.layout == "groups_adjacent",
        )
        self.replicas = Replicas()  # which have nothing to sync, until there are sharded tables
        super().__init__(
            module,
            env,
            device,
            placed,
            sharders,
            init_data_parallel,
            init_parameters,
            data_parallel_wrapper,
        )
        scale_lookups(self._dmp_wrapped_module)
        self.replicas = replicas_of(self._dmp_wrapped_module, self._groups, grid)
        for sharded in self._dmp_wrapped_module.modules():
            if isinstance(sharded, ShardedEmbeddingModule):
                sharded.register_state_dict_pre_hook(lambda *_: self.replicas.finish())

    def sync(self, include_optimizer_state: bool = True) -> None:
        """Brings replicas together in every ``sync_every``-th call; to be called after each step.

        Args:
            include_optimizer_state: as in ``DMPCollection``; must be True, since
                ``GridOptions.sync_optimizer_state`` says it.
        """
        if not include_optimizer_state:
            raise ValueError(
                "include_optimizer_state is False, must be True: set "
                "GridOptions.sync_optimizer_state instead"
            )
        self.replicas.step()

    def sync_now(self) -> None:
        """Syncs at once, and is done when it returns; all ranks must call it.

        For evaluations and checkpoints in the middle of ``sync_every`` steps.  The next one is
        ``sync_every`` steps later.
        """
        self.replicas.sync_now()

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        self.replicas.finish()
        result = super().load_state_dict(*args, **kwargs)
        self.replicas.begin()
        return result

    def _init_optim(self, module: nn.Module) -> CombinedOptimizer:
        """Makes TorchRec's optimizer, with an eye on who looks at its state."""
        optimizers: Any = self._fused_optim_impl(module, [], module_id_cache={})
        return _GridOptimizer(optimizers, self)

    def set_all_reduce_hook(self, reduce_hook: Any) -> None:
        raise ValueError("GridModelParallel has no all-reduce hook: it syncs rows, not tensors")


class _GridOptimizer(CombinedOptimizer):
    """The tables' optimizer; a sync that is under way ends before its state is shown."""

    def __init__(self, optimizers: Any, model: GridModelParallel) -> None:
        self._model = [model]  # in a list: not a part of this object to whoever looks for modules
        super().__init__(optimizers)

    @property
    def state(self) -> Any:
        self._model[0].replicas.finish()
        return super().state


def _check_plan(plan: ShardingPlan, grid: GridOptions) -> None:
    """Refuses plans that groups cannot be trained with.

    Raises:
        ValueError: the plan has tables that cannot be synced, or not in this way.
    """
    tables = [
        (name, sharding)
        for of_module in plan.plan.values()
        for name, sharding in of_module.items()
        if sharding.sharding_type != ShardingType.DATA_PARALLEL.value
    ]
    for name, sharding in tables:
        if sharding.compute_kernel not in KERNELS:
            raise ValueError(
                f"plan of table {name!r} ({sharding.sharding_type}): compute_kernel is "
                f"{sharding.compute_kernel!r}, must be one of {', '.join(KERNELS)}, or the table "
                "data_parallel: groups sync tables that FBGEMM updates in backward"
            )
    stock = [name for name, sharding in tables if sharding.sharding_type not in FUSED_TYPES]
    if stock and grid.sync == "gradients":
        raise ValueError(
            f"sync is 'gradients', but tables {', '.join(stock)} are not fused: FBGEMM updates "
            "them in backward, before gradients can be shared; shard them as one of "
            f"{', '.join(FUSED_TYPES)}, or use sync 'weights'"
        )
