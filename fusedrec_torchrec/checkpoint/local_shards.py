"""The shards of a tensor that a rank holds, whatever class it has."""

from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torchrec.distributed.types import ShardedTensor

__all__ = ["local_shards"]

LocalShard = tuple[tuple[int, ...], torch.Tensor]


def local_shards(value: torch.Tensor) -> list[LocalShard]:
    """Returns the offsets in the whole, and the tensor, of each shard on this rank."""
    if isinstance(value, ShardedTensor):
        return [
            (tuple(shard.metadata.shard_offsets), shard.tensor) for shard in value.local_shards()
        ]
    if isinstance(value, DTensor):
        local: Any = value.to_local()
        if not hasattr(local, "local_shards"):
            raise ValueError(
                f"a DTensor with placements {value.placements} is not one of TorchRec's shardings"
            )
        # Without shards there is still one offset.
        offsets = local.local_offsets()
        shards = local.local_shards()
        return [(tuple(at), shard) for at, shard in zip(offsets, shards, strict=False)]
    return [((0,) * value.dim(), value)]
