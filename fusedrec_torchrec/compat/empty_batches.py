"""Batches of no samples beside stock tables that are sharded by rows.

TorchRec has FBGEMM split every batch by the owners of its rows.  On CUDA FBGEMM refuses to launch a
kernel for nothing, on the one rank whose batch is empty, and the others would wait for it.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torchrec.distributed.sharding import rw_sharding, twrw_sharding
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

__all__ = ["splits_nothing"]

MODULES: tuple[Any, ...] = (rw_sharding, twrw_sharding)


@contextmanager
def splits_nothing(batch: KeyedJaggedTensor) -> Iterator[None]:
    """Has stock shardings split a batch without FBGEMM in here, if it has no samples."""
    if batch.lengths().numel():
        yield
        return
    # HACK: TorchRec calls this function by its name in these modules.
    before = [module.bucketize_kjt_before_all2all for module in MODULES]
    try:
        for module in MODULES:
            module.bucketize_kjt_before_all2all = _bucketized
        yield
    finally:
        for module, function in zip(MODULES, before, strict=True):
            module.bucketize_kjt_before_all2all = function


def _bucketized(
    kjt: KeyedJaggedTensor,
    num_buckets: int,
    block_sizes: torch.Tensor,
    total_num_blocks: torch.Tensor | None = None,
    output_permute: bool = False,
    bucketize_pos: bool = False,
    **_: Any,
) -> tuple[KeyedJaggedTensor, torch.Tensor | None]:
    """Returns what TorchRec's ``bucketize_kjt_before_all2all`` does for a batch of no samples."""
    values, variable = kjt.values(), kjt.variable_stride_per_key()
    split = KeyedJaggedTensor(
        keys=kjt.keys() * num_buckets,
        values=values,
        weights=values.clone() if bucketize_pos else kjt.weights_or_none(),
        lengths=kjt.lengths(),
        stride=None if variable else 0,
        stride_per_key_per_rank=kjt.stride_per_key_per_rank() * num_buckets if variable else None,
    )
    return split, values.clone() if output_permute else None
