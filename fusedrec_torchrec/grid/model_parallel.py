"""``GridModelParallel``: 2D sparse parallelism for fused and stock tables, on CPU and CUDA.

Tables are sharded over the ranks of a group, and each group is a replica of the others
("Two-dimensional sparse parallelism", Meta, 2025).  TorchRec's ``DMPCollection`` does the same on
CUDA only, and syncs whole shards.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torchrec.distributed.embedding_types import BaseEmbeddingSharder
from torchrec.distributed.model_parallel import (
    DataParallelWrapper,
    DistributedModelParallel,
    DMPCollection,
)
from torchrec.distributed.types import (
    DMPCollectionContext,
    ModuleSharder,
    ShardingEnv2D,
    ShardingPlan,
    ShardingType,
)
from torchrec.optim.keyed import CombinedOptimizer

from fusedrec_torchrec.grid.groups import Groups
from fusedrec_torchrec.grid.options import GridOptions
from fusedrec_torchrec.grid.sync import replicas_of
from fusedrec_torchrec.momentum_scale import (
    resolve_fused_params,
    resolve_parameters,
    scale_lookups,
)
from fusedrec_torchrec.planner import FusedShardingPlanner
from fusedrec_torchrec.sharders import fused_sharders, is_fused
from fusedrec_torchrec.sharding_plan import GridShardingPlan
from fusedrec_torchrec.sharding_type import FUSED

__all__ = ["GridModelParallel"]


class GridModelParallel(DMPCollection):
    """``DistributedModelParallel`` over groups of ranks.

    Call ``sync()`` after every training step; TorchRec's training pipelines do it by themselves.
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
        device = device or torch.device("cpu")
        sharders = sharders or fused_sharders()
        size = grid.sharding_group_size
        groups = grid.groups(dist.get_world_size())
        resolve_parameters(module, groups)
        for sharder in sharders:
            if isinstance(sharder, BaseEmbeddingSharder) and not is_fused(sharder):
                sharder._fused_params = resolve_fused_params(sharder._fused_params, groups)
        if isinstance(plan, GridShardingPlan) and plan.sharding_group_size != size:
            raise ValueError(
                f"sharding_group_size is {size}, but the plan was made for groups of "
                f"{plan.sharding_group_size} ranks"
            )
        if plan is None:
            planner = FusedShardingPlanner(sharding_group_size=size)
            plan = planner.collective_plan(module, sharders, everyone)
        _check_plan(plan, grid)
        self._groups = Groups.create(grid, device)
        placed = self._groups.place(plan)
        env = ShardingEnv2D(
            global_pg=everyone,
            sharding_pg=self._groups.sharding_pg,
            replica_pg=self._groups.replica_pg,
            device_mesh=self._groups.mesh,
            node_group_size=size,
            use_inter_host_allreduce=grid.layout == "groups_adjacent",
        )
        # What DMPCollection's methods use; its constructor would insist on CUDA.
        self._device = device
        self._submodule_ctxs: list[DMPCollectionContext] = []
        self._default_ctx = DMPCollectionContext(
            module=None,  # type: ignore[arg-type]
            plan=placed,
            sharding_group_size=size,
            device_mesh=self._groups.mesh,
            sharding_pg=self._groups.sharding_pg,
            replica_pg=self._groups.replica_pg,
        )
        self._ctxs = [self._default_ctx]
        DistributedModelParallel.__init__(
            self,
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

    def sync(self, include_optimizer_state: bool = True) -> None:
        """After a training step: replicas are brought together, every ``sync_every`` calls.

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
        """A sync that does not wait for its turn, and is done when it returns; on all ranks.

        For evaluations and checkpoints in the middle of ``sync_every`` steps.  The next one is
        ``sync_every`` steps later.
        """
        self.replicas.sync_now()

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        self.replicas.finish()
        return super().state_dict(*args, **kwargs)

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        self.replicas.finish()
        result = super().load_state_dict(*args, **kwargs)
        self.replicas.begin()
        return result

    def _init_optim(self, module: nn.Module) -> CombinedOptimizer:
        """TorchRec's, with an eye on who looks at its state."""
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
    def state(self) -> Any:  # type: ignore[override]
        replicas = getattr(self._model[0], "replicas", None)
        if replicas is not None:
            replicas.finish()
        return super().state


def _check_plan(plan: ShardingPlan, grid: GridOptions) -> None:
    """
    Raises:
        ValueError: the plan has stock tables, whose gradients cannot be shared.
    """
    if grid.sync != "gradients":
        return
    stock = [
        name
        for of_module in plan.plan.values()
        for name, sharding in of_module.items()  # type: ignore[attr-defined]
        if sharding.sharding_type not in (FUSED, ShardingType.DATA_PARALLEL.value)
    ]
    if stock:
        raise ValueError(
            f"sync is 'gradients', but tables {', '.join(stock)} are not fused_row_wise: FBGEMM "
            "updates them in backward, before gradients can be shared; shard them fused_row_wise, "
            "or use sync 'weights'"
        )
