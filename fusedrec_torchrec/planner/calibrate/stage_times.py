"""Which rates the stages of a fused step tell apart, and how long they take on the slowest rank.

A step as a whole says little about what an id costs and what a row: shapes with more of one have
more of the other.  The stages of a step are timed one by one, so a group of stages that are limited
by the same rates is one more equation for these.
"""

import time
from collections.abc import Callable, Mapping
from typing import Any, Final, NamedTuple

import torch
import torch.distributed as dist

from fusedrec_torchrec.core.stages import StageTimer

__all__ = ["GROUPS", "StageGroup", "seconds_of_groups"]

STEPS = 8  # that are timed


class StageGroup(NamedTuple):
    """Names stages of a step, and the rates of the cost model that limit them."""

    stages: tuple[str, ...]
    rates: tuple[str, ...]


UPDATE = "update"  # FBGEMM's part of backward: what comes after the gradients
GROUPS: Final[Mapping[str, StageGroup]] = {
    "requests": StageGroup(("check", "keys", "dedup", "route", "bags"), ("ids", "bag_ids")),
    "owners": StageGroup(("lookup", UPDATE), ("lookup", "bag_lookup", "owner_ids")),
    "outputs": StageGroup(("pooling", "backward_pooling"), ("pooling",)),
}


def seconds_of_groups(step: Callable[[], Any], device: torch.device) -> dict[str, float]:
    """Returns how long each group of stages takes on the slowest rank, the median of some steps.

    There are none on CUDA, where a stage ends before its work is done.  All ranks must call it.
    """
    if device.type == "cuda":
        return {}
    times: dict[str, list[float]] = {name: [] for name in GROUPS}
    for _ in range(STEPS):
        dist.barrier()
        with StageTimer() as timer:
            step()
            ended = time.perf_counter()
        seconds = {**timer.seconds, UPDATE: ended - timer.ends["gradients"]}
        for name, group in GROUPS.items():
            times[name].append(sum(seconds[stage] for stage in group.stages))
    of_ranks = torch.tensor([times[name] for name in GROUPS])
    dist.all_reduce(of_ranks, op=dist.ReduceOp.MAX)
    return dict(zip(GROUPS, of_ranks.median(dim=1).values.tolist(), strict=True))
