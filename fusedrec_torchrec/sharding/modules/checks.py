"""Plans that TorchRec would accept and train wrongly are refused before a module is sharded."""

from collections.abc import Mapping

import torch
from torch import nn
from torchrec.distributed.embedding_types import EmbeddingComputeKernel
from torchrec.distributed.types import ParameterSharding, ShardingType

from fusedrec_torchrec.sharding.sharding_type import FUSED, FUSED_TYPES

__all__ = ["check_dense_sequences", "check_frozen"]

DENSE = EmbeddingComputeKernel.DENSE.value


def check_frozen(module: nn.Module, plan: Mapping[str, ParameterSharding]) -> None:
    """Refuses stock tables that are not to be trained: TorchRec would train them.

    Raises:
        ValueError: a table has requires_grad False, and its sharding does not honour that.
    """
    for name, parameter in module.named_parameters():
        table = name.split(".")[-2]
        if parameter.requires_grad or table not in plan or plan[table].sharding_type in FUSED_TYPES:
            continue
        raise ValueError(
            f"table {table!r} has requires_grad False and is sharded {plan[table].sharding_type}, "
            f"must be sharded {FUSED}: TorchRec's shardings train a table all the same"
        )


def check_dense_sequences(
    plan: Mapping[str, ParameterSharding], device: torch.device | None
) -> None:
    """Refuses what damages memory on CPU: tables of an EmbeddingCollection with the dense kernel.

    FBGEMM's dense CPU kernel pools although TorchRec asks it not to, and writes fewer rows than
    TorchRec reads.  Data-parallel tables have a lookup of our own there.

    Raises:
        ValueError: a table is sharded so.
    """
    if device is not None and device.type != "cpu":
        return
    for table, sharding in plan.items():
        is_local = sharding.sharding_type == ShardingType.DATA_PARALLEL.value
        if (
            sharding.compute_kernel == DENSE
            and sharding.sharding_type not in FUSED_TYPES
            and not is_local
        ):
            raise ValueError(
                f"plan of table {table!r} ({sharding.sharding_type} on cpu): compute_kernel is "
                f"'dense', must be 'fused' in an EmbeddingCollection: FBGEMM's dense kernel "
                "damages memory there"
            )
