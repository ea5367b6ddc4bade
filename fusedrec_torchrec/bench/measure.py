"""Measures all systems on one workload, interleaved.

Every system has processes of its own, as in real life: in one process, what the memory allocator
has learned from one system's tensors changes the times of the next.  They all exist at once and
take turns; those that wait do nothing.
"""

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

from fusedrec_torchrec.bench.allocators import Allocator
from fusedrec_torchrec.bench.links import hosts
from fusedrec_torchrec.bench.ranks import Ranks
from fusedrec_torchrec.bench.suite import (
    DEDUP_PER_TABLE,
    HOT_SYSTEMS,
    STOCK_DEDUP,
    SuiteConfig,
    WorkloadConfig,
    headline_of,
)
from fusedrec_torchrec.bench.workload import open_source, table_bytes
from fusedrec_torchrec.planner.search.owners import FUSED_MIXED
from fusedrec_torchrec.sharding.sharding_type import FUSED, OWNER_POOLED

__all__ = ["measure"]


def measure(
    suite: SuiteConfig,
    workload: WorkloadConfig,
    prepared: str | None,
    tick: Callable[[], None] = lambda: None,
    allocator: Allocator = "default",
) -> dict[str, Any]:
    """Measures one workload; returns what the results file has of it.

    Args:
        suite: how to measure.
        workload: what to measure, with its systems.
        prepared: folder of the prepared data that the workload is on; None if it is on none.
        tick: called for every measurement that is done.
        allocator: how the ranks keep memory.
    """
    left_out = _left_out(suite, workload, prepared)
    names: list[str] = [name for name in workload.systems if name not in left_out]
    with ExitStack() as stack:
        places = stack.enter_context(hosts(workload.ranks, workload.link))
        systems = {
            name: stack.enter_context(Ranks(name, suite, workload, prepared, places, allocator))
            for name in names
        }
        for ranks in systems.values():
            ranks.wait_until_ready()
        memory = {name: max(ranks.ask("memory")) for name, ranks in systems.items()}
        requests = {name: _add_up(ranks.ask("requests")) for name, ranks in systems.items()}
        headline = headline_of(names)
        fused = None if headline is None else systems[headline]
        bounds = [] if fused is None else fused.ask("make_bounds")[0]
        replayed = [name for name in (DEDUP_PER_TABLE, FUSED) if name in names]
        replayed = replayed if DEDUP_PER_TABLE in replayed else []
        replay_bytes = {name: sum(systems[name].ask("make_replay")) for name in replayed}

        seconds: dict[str, list[float]] = {name: [] for name in systems}
        bound_seconds: dict[str, list[float]] = {name: [] for name in bounds}
        replay_seconds: dict[str, list[float]] = {name: [] for name in replay_bytes}
        for pair in range(suite.pairs):
            numbers = list(range(pair * suite.steps, (pair + 1) * suite.steps))
            for name in (*names[pair % len(names) :], *names[: pair % len(names)]):
                seconds[name].append(max(systems[name].ask("step", numbers=numbers)))
                tick()
            for name in replayed if pair % 2 else reversed(replayed):
                replay_seconds[name].append(max(systems[name].ask("replay", numbers=numbers)))
            if fused is not None:
                for operation, times in bound_seconds.items():
                    times.append(max(fused.ask("bound", operation=operation, numbers=numbers)))
        result: dict[str, Any] = {
            "left_out": left_out,
            "seconds": seconds,
            "bound_seconds": bound_seconds,
            "memory": memory,
            "requests": requests,
            "wire": {name: ranks.ask("wire") for name, ranks in systems.items()},
        }
        if replay_bytes:
            result.update(replay_bytes=replay_bytes, replay_seconds=replay_seconds)
        hot = next((systems[name] for name in names if name in HOT_SYSTEMS), None)
        if hot is not None:
            result["owners"] = _add_up(hot.ask("owners"))
        if fused is not None and headline is not None:
            phases = fused.ask("phases", steps=suite.pairs * suite.steps)
            result["phases"] = {k: v / len(phases) for k, v in _add_up(phases).items()}
            result["planner_picks"] = fused.ask("planner_picks")[0]
            result.update(requests[headline])
        return result


def _add_up(answers: list[Any]) -> Any:
    """Returns the sums of the numbers in lists and dictionaries of one shape."""
    first = answers[0]
    if isinstance(first, dict):
        return {key: _add_up([answer[key] for answer in answers]) for key in first}
    if isinstance(first, list):
        return [_add_up(list(values)) for values in zip(*answers, strict=True)]
    return sum(answers)


def _left_out(suite: SuiteConfig, workload: WorkloadConfig, prepared: str | None) -> dict[str, str]:
    """Returns the systems that cannot run this workload, and why."""
    reasons = {}
    size = table_bytes(workload, open_source(workload, prepared))
    if workload.module == "ec":
        reasons["data_parallel"] = "TorchRec's dense EmbeddingCollection kernel fails on CPU"
        for name in (*OWNER_POOLED, FUSED_MIXED):
            reasons[name] = "sequences have no bags that an owner could pool"
        reasons[DEDUP_PER_TABLE] = "its tables are collections of bags"
    elif size > suite.data_parallel_mib << 20:
        reasons["data_parallel"] = f"tables have {size >> 20} MiB, more than data_parallel_mib"
    for name in STOCK_DEDUP:
        if workload.module != "ec":
            reasons[name] = "TorchRec makes ids of sequences unique, not those of bags"
        elif suite.device == "cpu":
            reasons[name] = "TorchRec makes ids unique on CUDA only"
    if workload.ranks % 2:
        reasons["table_row_wise"] = "two emulated nodes need an even number of ranks"
    return {name: reason for name, reason in reasons.items() if name in workload.systems}
