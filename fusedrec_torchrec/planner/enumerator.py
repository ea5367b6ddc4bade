"""Sharding options of ``fused_row_wise`` among TorchRec's own.

TorchRec's enumerator raises on sharding types it does not know.  To it, a fused option is a
row-wise one (rows are split over all ranks in the same way); it gets its own name as soon as the
options are made.
"""

from torchrec.distributed.planner.enumerators import EmbeddingEnumerator
from torchrec.distributed.planner.types import ShardingOption
from torchrec.distributed.types import ShardingType

from fusedrec_torchrec.exchange.lookup import CUDA_KERNELS
from fusedrec_torchrec.sharding_type import FusedShardingType

__all__ = ["FusedEnumerator", "is_fused"]

FUSED = FusedShardingType.FUSED_ROW_WISE.value
FUSED_KERNELS = {kernel.value for kernel in CUDA_KERNELS}


class _FusedAsRowWise(str):
    """The string ``"row_wise"``, to be told apart from a real one only by its class."""

    __slots__ = ()


FUSED_AS_ROW_WISE = _FusedAsRowWise(ShardingType.ROW_WISE.value)


def is_fused(option: ShardingOption) -> bool:
    """Whether a sharding option is one of ours."""
    return bool(option.sharding_type == FUSED)


class FusedEnumerator(EmbeddingEnumerator):
    """TorchRec's ``EmbeddingEnumerator`` that knows ``fused_row_wise``, with the same arguments."""

    def populate_estimates(self, sharding_options: list[ShardingOption]) -> None:
        for option in sharding_options:
            if isinstance(option.sharding_type, _FusedAsRowWise):
                option.sharding_type = FUSED
        super().populate_estimates(sharding_options)

    def _filter_sharding_types(
        self, name: str, allowed_sharding_types: list[str], sharder_key: str = ""
    ) -> list[str]:
        types = super()._filter_sharding_types(name, allowed_sharding_types, sharder_key)
        # Sorted: TorchRec's own order is that of a set, which differs from run to run.
        return [FUSED_AS_ROW_WISE if t == FUSED else t for t in sorted(types)]

    def _filter_compute_kernels(
        self, name: str, allowed_compute_kernels: list[str], sharding_type: str
    ) -> list[str]:
        if isinstance(sharding_type, _FusedAsRowWise):
            allowed_compute_kernels = [k for k in allowed_compute_kernels if k in FUSED_KERNELS]
        kernels = super()._filter_compute_kernels(name, allowed_compute_kernels, sharding_type)
        return sorted(kernels)
