"""One rank's part of a benchmark: all systems and lower bounds, interleaved."""

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

import torch
import torch.distributed as dist

from fusedrec_torchrec.bench.bounds import Bounds
from fusedrec_torchrec.bench.phases import phases_of
from fusedrec_torchrec.bench.suite import SuiteConfig, WorkloadConfig
from fusedrec_torchrec.bench.systems import System, build, planner_picks
from fusedrec_torchrec.bench.workload import Workload
from fusedrec_torchrec.collectives import CollectiveCounter
from fusedrec_torchrec.data.samples import Source
from fusedrec_torchrec.sharding_type import FUSED

__all__ = ["measure"]


def measure(
    suite: SuiteConfig,
    config: WorkloadConfig,
    source: Source,
    tick: Callable[[], None],
) -> dict[str, Any]:
    """Figures of one workload; a collective call, the result is the same on all ranks.

    Args:
        suite: how to measure.
        config: what to measure, with its systems.
        source: the data.
        tick: called once for every measurement.
    """
    workload = Workload.make(config, source, dist.get_rank())
    left_out = _left_out(suite, workload)
    systems = [build(name, workload) for name in config.systems if name not in left_out]
    for system in systems:
        for step in range(suite.warm_up):
            system.step(workload.batches[step % len(workload.batches)])
    fused = next((system for system in systems if system.name == FUSED), None)
    bounds = None if fused is None else Bounds(fused, workload)

    seconds: dict[str, list[float]] = {system.name: [] for system in systems}
    bound_seconds: dict[str, list[float]] = {} if bounds is None else {n: [] for n in bounds.parts}
    for pair in range(suite.pairs):
        numbers = [(pair * suite.steps + i) % len(workload.batches) for i in range(suite.steps)]
        for system in systems:
            seconds[system.name].append(
                _slowest(system.step, [workload.batches[n] for n in numbers])
            )
            tick()
        if bounds is not None:
            for name, part in bounds.parts.items():
                bound_seconds[name].append(_slowest(part, numbers))
    result: dict[str, Any] = {
        "left_out": left_out,
        "seconds": seconds,
        "bound_seconds": bound_seconds,
        "wire": {system.name: _wire(system, workload) for system in systems},
    }
    if fused is not None:
        assert bounds is not None
        result["phases"] = phases_of(fused, workload, suite.pairs * suite.steps)
        result["ids"] = bounds.ids
        result["unique"] = bounds.unique
        result["outputs"] = bounds.outputs
        result["planner_picks"] = planner_picks(workload)
        result["unique_remote_bytes"] = bounds.unique_remote_bytes
    return result


def _left_out(suite: SuiteConfig, workload: Workload) -> dict[str, str]:
    """Systems that cannot run this workload, and why."""
    reasons = {}
    if workload.config.module == "ec":
        reasons["data_parallel"] = "TorchRec's dense EmbeddingCollection kernel fails on CPU"
    elif workload.table_bytes > suite.data_parallel_mib << 20:
        reasons["data_parallel"] = (
            f"tables have {workload.table_bytes >> 20} MiB, more than data_parallel_mib"
        )
    if workload.config.ranks % 2:
        reasons["table_row_wise"] = "two emulated nodes need an even number of ranks"
    return {name: reason for name, reason in reasons.items() if name in workload.config.systems}


def _slowest(function: Callable[[Any], None], arguments: Sequence[Any]) -> float:
    """Seconds of one call, on the slowest rank.

    One call before does not count: caches and free memory are those of whatever ran last.
    """
    function(arguments[-1])
    dist.barrier()
    begun = time.perf_counter()
    for argument in arguments:
        function(argument)
    elapsed = torch.tensor((time.perf_counter() - begun) / len(arguments), dtype=torch.float64)
    dist.all_reduce(elapsed, dist.ReduceOp.MAX)
    return float(elapsed)


def _wire(system: System, workload: Workload) -> list[list[dict[str, Any]]]:
    """Collectives of the first batch's step, of each rank."""
    with CollectiveCounter() as counter:
        system.step(workload.batches[0])
    own = [{**asdict(c), "dtype": str(c.dtype).removeprefix("torch.")} for c in counter.collectives]
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, own)
    return everyone
