"""What torch knows of a process group and does not tell: its timeout, and the store behind it."""

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from fusedrec_torchrec.compat.stores import Store

__all__ = ["another_group", "default_store", "end_group", "timeout_of"]


def timeout_of(pg: dist.ProcessGroup | None, device: torch.device) -> timedelta:
    """Returns after which time collectives of a group end; of the default group if it is None.

    Raises:
        AttributeError, RuntimeError: the backend does not know.
    """
    group: Any = pg or dist.group.WORLD
    timeout: timedelta = group._get_backend(device).options._timeout
    return timeout


def default_store() -> Store:
    """Returns the store that the ranks of the default group have met in."""
    return distributed_c10d._get_default_store()


def another_group(pg: dist.ProcessGroup, device: torch.device, name: str) -> dist.ProcessGroup:
    """Makes another group of the same ranks, backend and timeout; only they need to call this.

    HACK: ``new_group`` has ``use_local_synchronization`` for that, but then it names the group by
    the number of groups that a rank has, and waits in vain for ranks that have more or fewer.

    Args:
        pg: the group.
        device: whose backend of it is meant.
        name: of the new group, after the name of the first.
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
        group_name=dist.GroupName(f"{pg.group_name}.{name}"),
        timeout=timeout_of(pg, device),
        group_desc=name.replace("_", " "),
    )
    places = {global_rank: rank for rank, global_rank in enumerate(ranks)}
    distributed_c10d._world.pg_group_ranks[made] = places
    return made


def end_group(pg: dist.ProcessGroup) -> None:
    """Ends a group, on this rank alone, unless it has ended with all others already."""
    if pg in distributed_c10d._world.pg_map:
        dist.destroy_process_group(pg)
