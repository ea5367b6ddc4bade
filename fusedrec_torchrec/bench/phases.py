"""Measures where the time of a fused step goes."""

import time

import torch.distributed as dist

from fusedrec_torchrec.bench.systems import System
from fusedrec_torchrec.bench.workload import Workload
from fusedrec_torchrec.core.stages import STAGES, StageTimer

__all__ = ["phases_of"]


def phases_of(fused: System, workload: Workload, steps: int) -> dict[str, float]:
    """Returns the mean seconds of each stage of a step, on this rank.

    ``update`` is FBGEMM's part of backward, from the arrival of the gradients to the end;
    ``other`` is what no stage accounts for; ``step`` is the whole.  There are none if the plan has
    no fused table, and none on CUDA, where a stage ends before its work is done.
    """
    if fused.device.type == "cuda":
        return {}
    names = [*STAGES, "update", "other", "step"]
    totals = dict.fromkeys(names, 0.0)
    for number in range(steps):
        batch = workload.batches[number % len(workload.batches)]
        dist.barrier()
        with StageTimer() as timer:
            begun = time.perf_counter()
            fused.step(batch)
            ended = time.perf_counter()
        if "gradients" not in timer.ends:
            return {}
        update = ended - timer.ends["gradients"]
        for name, seconds in timer.seconds.items():
            totals[name] += seconds
        totals["update"] += update
        totals["step"] += ended - begun
        totals["other"] += ended - begun - update - sum(timer.seconds.values())
    return {name: total / steps for name, total in totals.items()}
