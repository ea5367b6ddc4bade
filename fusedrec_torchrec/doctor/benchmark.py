"""Times a few training steps beside TorchRec's, so that a report says what is usual on a machine.

Both systems are in one process, where the memory allocator has learned from the one when the other
runs: it is a first impression.  ``fusedrec bench`` measures.
"""

import time
from collections.abc import Sequence
from dataclasses import replace
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

from fusedrec_torchrec.bench.statistics import paired_ratio
from fusedrec_torchrec.bench.suite import WorkloadConfig
from fusedrec_torchrec.bench.systems import System, build
from fusedrec_torchrec.bench.workload import Workload, open_source
from fusedrec_torchrec.doctor.findings import Finding, good
from fusedrec_torchrec.sharding.sharding_type import FUSED

__all__ = ["BENCHMARK", "judged", "timed_steps"]

BENCHMARK = "small benchmark"
WORKLOAD = WorkloadConfig(
    name=BENCHMARK, batch_size=512, tables=8, rows=10_000, dims=[32], zipf=1.1, pooling=4
)
STOCK = "row_wise"
SYSTEMS = (FUSED, STOCK)
PAIRS, STEPS, WARM_UP = 5, 4, 2


def timed_steps(device: torch.device) -> dict[str, list[float]]:
    """Returns the seconds of a step of each system, by pairs; all ranks must call it."""
    config = replace(WORKLOAD, ranks=dist.get_world_size())
    workload = Workload.make(config, open_source(config, None), dist.get_rank())
    batches = [batch.to(device) for batch in workload.batches]
    systems = {name: build(name, workload, device) for name in SYSTEMS}
    for system in systems.values():
        _seconds(system, batches[:WARM_UP])
    seconds: dict[str, list[float]] = {name: [] for name in SYSTEMS}
    for pair in range(PAIRS):
        numbers = range(pair * STEPS, (pair + 1) * STEPS)
        for name in SYSTEMS if pair % 2 else reversed(SYSTEMS):
            taken = [batches[number % len(batches)] for number in numbers]
            seconds[name].append(_seconds(systems[name], taken))
    return seconds


def judged(answers: Sequence[dict[str, list[float]]]) -> Finding:
    """Returns what all ranks have timed; the slowest one counts in each pair."""
    slowest = {
        name: [max(times) for times in zip(*(a[name] for a in answers), strict=True)]
        for name in SYSTEMS
    }
    ms = {name: 1e3 * median(times) for name, times in slowest.items()}
    ratio = paired_ratio(slowest[STOCK], slowest[FUSED])
    return good(
        BENCHMARK,
        f"a step takes {ms[FUSED]:.1f} ms with {FUSED}, {ms[STOCK]:.1f} ms with TorchRec's "
        f"{STOCK}: {ratio} times as long, median of {PAIRS} pairs",
        **_described(len(answers)),
        step_ms=ms,
    )


def _described(ranks: int) -> dict[str, Any]:
    w = WORKLOAD
    tables = f"{w.tables} x {w.rows} rows x {w.dims[0]} columns"
    return {"ranks": ranks, "tables": tables, "samples of a rank": w.batch_size}


def _seconds(system: System, batches: Sequence[Any]) -> float:
    """Returns the mean seconds of a step, all work on the device included."""
    dist.barrier()
    _finish(system.device)
    begun = time.perf_counter()
    for batch in batches:
        system.step(batch)
    _finish(system.device)
    return (time.perf_counter() - begun) / len(batches)


def _finish(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
