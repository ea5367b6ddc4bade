"""TorchRec's own planner does not know ``fused_row_wise``: what to use instead.

``DistributedModelParallel`` asks it when it gets no plan, and it fails on the first fused sharding
option, with a text that does not help.
"""

from types import FrameType

from torchrec.distributed.planner.enumerators import EmbeddingEnumerator

from fusedrec_torchrec.sharding.sharding_type import FUSED

__all__ = ["refuse_stock_planner"]


def refuse_stock_planner(caller: FrameType) -> None:
    """Refuses to tell TorchRec's enumerator about kernels of fused tables.

    It asks for them when constraints leave it a fused sharding type, just before it fails.  Ours
    asks for those of row-wise tables instead, and everybody else may ask.

    HACK: planners do not tell sharders who they are, so this looks who calls.  It can go when
    TorchRec's planner takes sharding types of others.

    Args:
        caller: the frame that asks.

    Raises:
        ValueError: it is TorchRec's enumerator.
    """
    if caller.f_code is EmbeddingEnumerator.enumerate.__code__:
        raise ValueError(
            f"TorchRec's own planner does not know the sharding type {FUSED}. Pass a plan to "
            "DistributedModelParallel, plan=fr.FusedShardingPlanner().collective_plan(model, "
            "sharders) with `import fusedrec_torchrec as fr`, and use FusedShardingPlanner in the "
            "place of EmbeddingShardingPlanner; or restrict all tables to TorchRec's sharding "
            "types by ParameterConstraints(sharding_types=[...])"
        )
