"""One FBGEMM table for buckets of several dimensions, which a single call looks up and updates.

A call of FBGEMM takes as many bags of every table, unless it is told how many there are of each
feature and rank: *variable batches*.  Buckets of different dimensions are asked for different
numbers of rows, so that is what one call for all of them needs.  What it returns is flat, rank
after rank, and of each rank feature after feature.

The joint table has the memory of rows and of their optimizer state.  The tables of the buckets
(``bucket_table``) show parts of it, so everybody who reads, writes, saves or averages rows goes on
to ask these.  Only CUDA has such tables: on CPU, FBGEMM takes variable batches apart, bag by bag.
"""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from fbgemm_gpu.split_table_batched_embeddings_ops_common import EmbeddingLocation, PoolingMode
from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
    ComputeDevice,
    SplitTableBatchedEmbeddingBagsCodegen,
    WeightDecayMode,
)
from torchrec.distributed.embedding_types import EmbeddingComputeKernel, GroupedEmbeddingConfig

from fusedrec_torchrec.compat.fbgemm_table import device_of
from fusedrec_torchrec.compat.optimizers import OPTIMIZERS

__all__ = ["JointPart", "JointTable", "joint_kind"]

# Settings of FBGEMM that mean the same for one table and for several.
KNOWN_SETTINGS = {
    "beta1",
    "beta2",
    "bounds_check_mode",
    "cache_algorithm",
    "cache_load_factor",
    "cache_precision",
    "cache_reserved_memory",
    "cache_sets",
    "eps",
    "gradient_clipping",
    "learning_rate",
    "max_gradient",
    "max_norm",
    "optimizer",
    "output_dtype",
    "prefetch_pipeline",
    "stochastic_rounding",
    "weight_decay",
    "weight_decay_mode",
}
# Others count the steps of each row.
WEIGHT_DECAYS = (WeightDecayMode.NONE, WeightDecayMode.L2, WeightDecayMode.DECOUPLE)


def joint_kind(
    config: GroupedEmbeddingConfig, compute_kernel: EmbeddingComputeKernel
) -> Hashable | None:
    """Returns what buckets must have in common to be in one joint table on CUDA.

    Args:
        config: the tables of a bucket.
        compute_kernel: that of all these tables.

    Returns:
        None if they cannot be in any.
    """
    settings = config.fused_params or {}
    optimizer = OPTIMIZERS[settings.get("optimizer", EmbOptimType.EXACT_SGD)]
    if (
        compute_kernel != EmbeddingComputeKernel.FUSED
        or not optimizer.variable_batches
        or not settings.keys() <= KNOWN_SETTINGS
        or settings.get("weight_decay_mode", WeightDecayMode.NONE) not in WEIGHT_DECAYS
    ):
        return None
    return config.data_type, frozenset(settings.items())


class JointTable(SplitTableBatchedEmbeddingBagsCodegen):
    """One FBGEMM table in device memory that is made of the tables of several buckets.

    Args:
        shapes: rows on this rank, at least one, and columns of each bucket's table.
        tables_of_features: for each feature of a call the number of its table.
        **settings: those of ``SplitTableBatchedEmbeddingBagsCodegen``.
    """

    def __init__(
        self,
        shapes: Sequence[tuple[int, int]],
        tables_of_features: Sequence[int],
        **settings: Any,
    ) -> None:
        super().__init__(
            embedding_specs=[
                (rows, dim, EmbeddingLocation.DEVICE, ComputeDevice.CUDA) for rows, dim in shapes
            ],
            feature_table_map=list(tables_of_features),
            pooling_mode=PoolingMode.SUM,
            **settings,
        )

    def part(self, number: int) -> "JointPart":
        """Returns what the table of a bucket is made of."""
        return JointPart(self, number)

    def _generate_vbe_metadata(self, *args: Any, **kwargs: Any) -> Any:
        """Makes FBGEMM's description of a variable batch, and copies it through pinned memory.

        FBGEMM copies from pageable memory, so that the host would wait for each of three copies.
        """
        device = device_of(self)
        self.current_device = torch.device("cpu")
        try:
            described = super()._generate_vbe_metadata(*args, **kwargs)
        finally:
            self.current_device = device
        return type(described)(
            *(
                value.pin_memory().to(device, non_blocking=True)
                if isinstance(value, torch.Tensor)
                else value
                for value in described
            )
        )


@dataclass(frozen=True)
class JointPart:
    """The part of a joint table that is the table of one bucket.

    Attributes:
        joint: the joint table.
        number: which of its tables it is.
    """

    joint: JointTable
    number: int

    def memory(self, prefix: str) -> torch.Tensor:
        """Returns the bucket's part of weights or of a state of the optimizer, flat.

        It counts writes for itself: those to other buckets do not look like writes to this one.

        Args:
            prefix: what FBGEMM calls it.
        """
        starts = getattr(self.joint, f"{prefix}_physical_offsets")
        flat: torch.Tensor = getattr(self.joint, f"{prefix}_dev")
        ends = [*starts[1:], flat.numel()]
        return flat.data[starts[self.number] : ends[self.number]]

    def share_steps(self, table: SplitTableBatchedEmbeddingBagsCodegen) -> None:
        """Has the bucket's table count the steps of the optimizer together with the joint table.

        They begin with the same settings, too, which otherwise differ in how many rows there are.
        No optimizer with variable batches asks for that.
        """
        table.iter, table.iter_cpu = self.joint.iter, self.joint.iter_cpu
        table.optimizer_args = self.joint.optimizer_args
