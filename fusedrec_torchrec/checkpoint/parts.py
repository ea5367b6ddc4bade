"""What a rank holds of a tensor: parts of a whole, whatever class says so."""

from collections.abc import Iterator
from typing import Any

import torch
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed.tensor import DTensor

__all__ = ["flatten", "local_parts", "whole_size"]

Part = tuple[tuple[int, ...], torch.Tensor]


def local_parts(value: torch.Tensor) -> list[Part]:
    """(offsets in the whole, tensor) of each part on this rank."""
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
        return [(tuple(at), part) for at, part in zip(offsets, shards, strict=False)]
    return [((0,) * value.dim(), value)]


def whole_size(value: torch.Tensor) -> torch.Size:
    """Of all ranks' parts together."""
    return torch.Size(value.size())


def flatten(state: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """Leaves of nested dictionaries and lists by the names that torch.distributed.checkpoint uses.

    A list without tensors is one leaf.
    """
    if isinstance(state, dict) and state:
        for key, value in state.items():
            yield from flatten(value, f"{name}.{key}" if name else str(key))
    elif isinstance(state, list) and _has_tensors(state):
        for i, value in enumerate(state):
            yield from flatten(value, f"{name}.{i}")
    else:
        yield name, state


def _has_tensors(value: Any) -> bool:
    if isinstance(value, dict):
        return any(map(_has_tensors, value.values()))
    if isinstance(value, list):
        return any(map(_has_tensors, value))
    return isinstance(value, torch.Tensor)
