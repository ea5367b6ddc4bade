"""TorchRec's DMPCollection on any device."""

from torch import nn
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
)

__all__ = ["AnyDeviceDMPCollection"]


class AnyDeviceDMPCollection(DMPCollection):
    """A ``DMPCollection`` made without its constructor, which insists on CUDA.

    The constructor makes process groups and a plan, and then calls that of
    ``DistributedModelParallel``.  Here both are given.  The contexts that it keeps are kept here,
    too.  Its all-reduce hook is not: whoever derives from this overrides ``sync`` and
    ``set_all_reduce_hook``, the methods that lead to it.

    Args:
        module: the model.
        env: ranks and process groups of both directions.
        device: where the model lives, as in ``DistributedModelParallel``.
        plan: for the ranks of this rank's group.
        sharders, init_data_parallel, init_parameters, data_parallel_wrapper: as in TorchRec.
    """

    def __init__(
        self,
        module: nn.Module,
        env: ShardingEnv2D,
        device: object,
        plan: ShardingPlan,
        sharders: list[ModuleSharder[nn.Module]],
        init_data_parallel: bool,
        init_parameters: bool,
        data_parallel_wrapper: DataParallelWrapper | None,
    ) -> None:
        self._device = device
        self._submodule_ctxs: list[DMPCollectionContext] = []
        self._default_ctx = DMPCollectionContext(
            module=None,
            plan=plan,
            sharding_group_size=env.sharding_pg.size(),
            device_mesh=env.device_mesh,
            sharding_pg=env.sharding_pg,
            replica_pg=env.replica_pg,
        )
        self._ctxs = [self._default_ctx]
        DistributedModelParallel.__init__(
            self,
            module,
            env,
            device,
            plan,
            sharders,
            init_data_parallel,
            init_parameters,
            data_parallel_wrapper,
        )
