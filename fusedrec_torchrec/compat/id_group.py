"""The process group in which ids travel on CPU, apart from everything else.

gloo matches collectives of a group by their order alone.  A training pipeline sends the ids of the
next batch in the midst of the current one, and a rank that has no next batch does not.  In one
group for all, the rows or the gradients of that rank would meet the ids of others, and gloo aborts
the process.  In a group of their own, ids are answered by ids or not at all.

On CUDA ids stay in the group that TorchRec was given: another NCCL communicator takes memory of
the GPU, and kernels of two communicators may wait for each other.
"""

import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

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
        _GROUPS[pg] = _another_group(pg, device)
    return _GROUPS[pg]


def _another_group(pg: dist.ProcessGroup, device: torch.device) -> dist.ProcessGroup:
    """Makes another group of the same ranks; only they need to call this.

    HACK: ``new_group`` has ``use_local_synchronization`` for that, but then it names the group by
    the number of groups that a rank has, and waits in vain for ranks that have more or fewer.
    """
    backend: Any = pg._get_backend(device)
    ranks = dist.get_process_group_ranks(pg)
    store = distributed_c10d._world.pg_map[distributed_c10d._get_default_group()][1]
    made, _ = distributed_c10d._new_process_group_helper(
        len(ranks),
        pg.rank(),
        ranks,
        dist.Backend(backend.name()),
        store,
        group_name=dist.GroupName(f"{pg.group_name}.fused_ids"),
        timeout=backend.options._timeout,
        group_desc="fused ids",
    )
    places = {global_rank: rank for rank, global_rank in enumerate(ranks)}
    distributed_c10d._world.pg_group_ranks[made] = places
    return made


@contextmanager
def ids_apart(shardings: Iterable[Any], device: torch.device) -> Iterator[None]:
    """Has stock shardings that make their input dists in here send ids in the group for ids."""
    # HACK: TorchRec gives input and output dists the same group.
    groups = [(each, each._pg) for each in shardings if getattr(each, "_pg", None) is not None]
    try:
        for sharding, pg in groups:
            sharding._pg = id_group(pg, device)
        yield
    finally:
        for sharding, pg in groups:
            sharding._pg = pg
