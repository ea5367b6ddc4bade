"""Refuses tables whose rows may change although no batch asks for them.

Rows of the next batch are sent early if the current one does not ask for them; that is only exact
if nothing else changes them.
"""

from collections.abc import Sequence

import torch

from fusedrec_torchrec.compat.bucket_table import BucketKernel
from fusedrec_torchrec.compat.optimizers import REPLICABLE
from fusedrec_torchrec.exchange.buckets import BucketConfig

__all__ = ["check_early"]


def check_early(
    buckets: Sequence[BucketConfig],
    kernels: Sequence[BucketKernel],
    device: torch.device,
    in_groups: bool,
) -> None:
    """Refuses tables whose rows cannot be sent early.

    Args:
        buckets: of a module.
        kernels: the rows of each on this rank.
        device: where they are.
        in_groups: whether groups of ranks are replicas of each other.

    Raises:
        ValueError: naming what must be otherwise.
    """
    if device.type != "cpu":
        raise ValueError(
            f"tables are on {device.type}, must be on cpu for rows to arrive early: use TorchRec's "
            "TrainPipelineSparseDist (early_rows: false)"
        )
    if in_groups:
        raise ValueError(
            "rows cannot arrive early with 2D parallelism: a sync of the groups changes rows that "
            "no batch of this group asks for; use TorchRec's TrainPipelineSparseDist "
            "(early_rows: false), or one group of all ranks"
        )
    for bucket, kernel in zip(buckets, kernels, strict=True):
        table, names = kernel.table, [t.name for t in bucket.config.embedding_tables]
        if table.optimizer_type not in REPLICABLE:
            known = ", ".join(kind.name for kind in REPLICABLE)
            raise ValueError(
                f"tables {names} have the optimizer {table.optimizer_type.name}, must be one of "
                f"{known} for rows to arrive early: it may change rows that no batch asks for"
            )
        if table.decays_weights:
            raise ValueError(
                f"tables {names} have weight_decay, must be without for rows to arrive early: it "
                "may change rows that no batch asks for"
            )
