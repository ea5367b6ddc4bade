"""The process group in which ids travel on CPU, apart from everything else.

gloo matches collectives of a group by their order alone.  A training pipeline sends the ids of the
next batch in the midst of the current one, and a rank that has no next batch does not.  In one
group for all, the rows or the gradients of that rank would meet the ids of others, and gloo aborts
the process.  In a group of their own, ids are answered by ids or not at all.

On CUDA ids stay in the group that TorchRec was given: another NCCL communicator takes memory of
the GPU, and kernels of two communicators may wait for each other.
"""

import secrets
import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torchrec.distributed.sharding.dp_sharding import BaseDpEmbeddingSharding

from fusedrec_torchrec.compat.process_groups import another_group, end_group

__all__ = ["id_group", "ids_apart"]

_GROUPS: weakref.WeakKeyDictionary[dist.ProcessGroup, dist.ProcessGroup] = (
    weakref.WeakKeyDictionary()
)


def id_group(pg: dist.ProcessGroup, device: torch.device) -> dist.ProcessGroup:
    """Returns the group for ids of a process group; when first asked, all its ranks must call it.

    Args:
        pg: the group of rows and gradients.
        device: where ids are.
    """
    if device.type != "cpu" or pg.size() == 1:
        return pg
    if pg not in _GROUPS:
        # A name of its own: a store may still have the addresses of an earlier group of the name.
        number = torch.tensor([secrets.randbits(62)])
        dist.broadcast(number, dist.get_global_rank(pg, 0), group=pg)
        made = another_group(pg, device, f"fused_ids_{int(number)}")
        weakref.finalize(pg, end_group, made).atexit = False
        _GROUPS[pg] = made
    return _GROUPS[pg]


@contextmanager
def ids_apart(shardings: Iterable[Any], device: torch.device) -> Iterator[None]:
    """Has stock shardings that make their input dists in here send ids in the group for ids.

    Raises:
        AssertionError: a sharding that sends ids does not have its process group where it should.
    """
    # HACK: TorchRec gives input and output dists the same group.
    groups = [(sharding, _group_of(sharding)) for sharding in shardings if _sends_ids(sharding)]
    try:
        for sharding, pg in groups:
            sharding._pg = id_group(pg, device)
        yield
    finally:
        for sharding, pg in groups:
            sharding._pg = pg


def _sends_ids(sharding: Any) -> bool:
    """Returns whether a sharding sends ids to other ranks; with data-parallel tables none does."""
    return not isinstance(sharding, BaseDpEmbeddingSharding)


def _group_of(sharding: Any) -> dist.ProcessGroup:
    pg: dist.ProcessGroup | None = getattr(sharding, "_pg", None)
    if pg is None:
        raise AssertionError(f"{type(sharding).__qualname__} has no process group in _pg")
    return pg
