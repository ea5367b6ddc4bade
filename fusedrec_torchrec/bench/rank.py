"""Runs one rank of one system: ``python -m fusedrec_torchrec.bench.rank JOB``, see ``ranks``.

It reads commands from standard input, one JSON list ``[name, arguments]`` a line, and answers each
with one line of JSON.  Commands are the methods of ``Rank``; all ranks of a system get the same.
"""

import json
import logging
import os
import sys
import time
import warnings
from collections.abc import Callable
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from fusedrec_torchrec.bench.bounds import Bounds, bounded
from fusedrec_torchrec.bench.owners import owner_requests
from fusedrec_torchrec.bench.peak_memory import forget_peak, memory
from fusedrec_torchrec.bench.phases import phases_of
from fusedrec_torchrec.bench.replay import Replay
from fusedrec_torchrec.bench.requests import requests_of
from fusedrec_torchrec.bench.suite import (
    HOT_SYSTEMS,
    STOCK_DEDUP,
    SuiteConfig,
    WorkloadConfig,
    steps_alike,
)
from fusedrec_torchrec.bench.systems import build, planner_picks
from fusedrec_torchrec.bench.workload import Workload, open_source
from fusedrec_torchrec.core.collective_counter import CollectiveCounter
from fusedrec_torchrec.core.config import from_mapping

__all__ = ["Rank", "main"]

NUMBERS = ("float", "bfloat", "uint8")


class Rank:
    """Holds a system's model on this rank, and what can be asked about it."""

    def __init__(self, job: dict[str, Any]) -> None:
        suite = from_mapping(SuiteConfig, job["suite"])
        config = from_mapping(WorkloadConfig, job["workload"])
        torch.set_num_threads(suite.threads)
        on_cuda, number = suite.device == "cuda", int(os.environ["LOCAL_RANK"])
        self._device = torch.device("cuda", number) if on_cuda else torch.device("cpu")
        if on_cuda:
            torch.cuda.set_device(self._device)
        dist.init_process_group(
            "nccl" if on_cuda else "gloo",
            init_method=f"file://{job['store']}",
            rank=int(os.environ["RANK"]),
            world_size=config.ranks,
            timeout=timedelta(minutes=10),
        )
        source = open_source(config, job["prepared"])
        self._workload = Workload.make(
            config, source, dist.get_rank(), hot_rows=job["system"] in HOT_SYSTEMS
        )
        self._batches = [batch.to(self._device) for batch in self._workload.batches]
        self._forget_peak()
        self._memory_before = (
            torch.cuda.memory_allocated(self._device) if on_cuda else memory("VmRSS")
        )
        self._system = build(job["system"], self._workload, self._device)
        # What planning and the making of a profile took for a while is no part of training.
        self._forget_peak()
        for step in range(suite.warm_up):
            self._system.step(self._batch(step))
        self._bounds: Bounds | None = None
        self._replay: Replay | None = None

    def _batch(self, number: int) -> Any:
        return self._batches[number % len(self._batches)]

    def step(self, numbers: list[int]) -> float:
        """Returns the seconds of a training step, as a mean over the batches of these numbers."""
        return self._seconds(lambda number: self._system.step(self._batch(number)), numbers)

    def bound(self, operation: str, numbers: list[int]) -> float:
        """Returns the seconds of an operation of the lower bound, for the same batches."""
        assert self._bounds is not None
        count = len(self._batches)
        numbers = [number % count for number in numbers]
        return self._seconds(self._bounds.operations[operation], numbers)

    def wire(self) -> list[dict[str, Any]]:
        """Returns the collectives of the first step; of eight steps if not all are alike.

        Each is of a kind: ``gradients`` in backward, before that ``rows`` if it carries numbers
        that are no integers (codecs make bytes of them), else ``ids``: all that serves to ask.
        """
        collectives: list[dict[str, Any]] = []
        for step in range(steps_alike(self._system.name)):
            with CollectiveCounter() as forward:
                outputs = self._system.forward(self._batch(step))
            with CollectiveCounter() as backward:
                self._system.backward(outputs)
            for counter in (forward, backward):
                for c in counter.collectives:
                    dtype = str(c.dtype).removeprefix("torch.")
                    kind = "rows" if dtype.startswith(NUMBERS) else "ids"
                    kind = "gradients" if counter is backward else kind
                    collectives.append({**asdict(c), "dtype": dtype, "kind": kind})
        return collectives

    def requests(self) -> dict[str, int]:
        """Returns what the first batch asks for."""
        dedup = self._system.name in STOCK_DEDUP
        return requests_of(self._workload, self._system.plan, dedup)

    def make_bounds(self) -> list[str]:
        """Makes the lower bounds ready, and returns their names; there are none for some plans."""
        if not bounded(self._system.plan):
            return []
        self._bounds = Bounds(self._system, self._workload)
        return list(self._bounds.operations)

    def make_replay(self) -> float:
        """Makes the all-to-alls of steps ready to be repeated; returns the bytes of a step."""
        self._replay = Replay(self._system, self._batches)
        return self._replay.bytes_sent

    def replay(self, numbers: list[int]) -> float:
        """Returns the seconds of the all-to-alls alone, for the same batches."""
        assert self._replay is not None
        return self._seconds(self._replay.run, numbers)

    def phases(self, steps: int) -> dict[str, float]:
        """Returns where the time of a step goes."""
        return phases_of(self._system, self._workload, steps)

    def planner_picks(self) -> dict[str, int]:
        """Returns how many tables our planner would shard in which way."""
        return planner_picks(self._workload)

    def owners(self) -> dict[str, Any]:
        """Returns what this rank's batches ask of each owner."""
        return owner_requests(self._workload)

    def memory(self) -> int:
        """Returns the peak of steps in bytes, beyond what was used before the model was built."""
        if self._device.type == "cuda":
            return torch.cuda.max_memory_allocated(self._device) - self._memory_before
        return memory("VmHWM") - self._memory_before

    def _forget_peak(self) -> None:
        """Has the peak of memory count from here."""
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._device)
        else:
            forget_peak()

    def _seconds(self, function: Callable[[int], None], numbers: list[int]) -> float:
        """Returns the mean seconds of a call, all work on the device included.

        One call before does not count: caches are those of whatever ran last.
        """
        function(numbers[-1])
        dist.barrier()
        self._finish()
        begun = time.perf_counter()
        for number in numbers:
            function(number)
        self._finish()
        return (time.perf_counter() - begun) / len(numbers)

    def _finish(self) -> None:
        """Waits until the device has done all that it was asked to do."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)


def main(job_file: str) -> None:
    """Builds the system of a job, and answers commands until standard input ends."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever a library prints must not look like an answer
    logging.disable(logging.WARNING)  # of TorchRec, about what the suite asks for
    warnings.filterwarnings("ignore")
    rank = Rank(json.loads(Path(job_file).read_text()))
    print("ready", file=answers, flush=True)
    for line in sys.stdin:
        name, arguments = json.loads(line)
        print(json.dumps(getattr(rank, name)(**arguments)), file=answers, flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
