"""Starts the ranks of a benchmark, each a process of its own, and collects their figures."""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fusedrec_torchrec.bench.links import hosts
from fusedrec_torchrec.bench.suite import SuiteConfig, WorkloadConfig
from fusedrec_torchrec.config import to_mapping

__all__ = ["RankError", "run_ranks"]


RESULT = "result.json"


class RankError(RuntimeError):
    """A rank of a benchmark ended with an error; the text is its own."""


def run_ranks(
    suite: SuiteConfig,
    workload: WorkloadConfig,
    prepared: str | None,
    alone: str | None = None,
    tick: Callable[[], None] = lambda: None,
) -> dict[str, Any]:
    """Runs one workload on its ranks, and returns what rank 0 wrote.

    Args:
        suite: how to measure.
        workload: what to measure.
        prepared: folder of prepared Criteo data, if there is one.
        alone: a system to run by itself, for its memory, instead of the comparison.
        tick: called for every measurement that is done.
    """
    with tempfile.TemporaryDirectory() as folder, hosts(workload.ranks, workload.link) as places:
        job = {
            "suite": to_mapping(suite),
            "workload": to_mapping(workload),
            "prepared": prepared,
            "alone": alone,
            "store": f"{folder}/store",
            "result": f"{folder}/{RESULT}",
        }
        job_file = Path(folder) / "job.json"
        job_file.write_text(json.dumps(job))
        processes: list[subprocess.Popen[str]] = []
        errors = [Path(folder) / f"rank_{rank}.err" for rank in range(workload.ranks)]
        try:
            for rank, place in enumerate(places):
                with errors[rank].open("w") as error_file:
                    processes.append(
                        subprocess.Popen(
                            [
                                *place.prefix,
                                *(sys.executable, "-m", "fusedrec_torchrec.bench.rank"),
                                str(job_file),
                            ],
                            env=_environment(rank, workload, suite, place.interface),
                            stdout=subprocess.PIPE,
                            stderr=error_file,
                            text=True,
                        )
                    )
            first = processes[0].stdout
            assert first is not None
            for _ in first:
                tick()
            _finish(processes, errors)
            result: dict[str, Any] = json.loads((Path(folder) / RESULT).read_text())
            return result
        finally:
            for process in processes:
                process.kill()
                process.wait()


def _environment(
    rank: int, workload: WorkloadConfig, suite: SuiteConfig, interface: str
) -> dict[str, str]:
    return {
        **os.environ,
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(workload.ranks),
        "LOCAL_WORLD_SIZE": str(workload.ranks),
        "GLOO_SOCKET_IFNAME": interface,
        "OMP_NUM_THREADS": str(suite.threads),
    }


def _finish(processes: list[subprocess.Popen[str]], errors: list[Path]) -> None:
    """Waits for all ranks; the first to fail is the one to hear of."""
    running = dict(enumerate(processes))
    while running:
        for rank, process in list(running.items()):
            try:
                code = process.wait(timeout=0.2)
            except subprocess.TimeoutExpired:
                continue
            del running[rank]
            if code:
                lines = errors[rank].read_text().strip().splitlines()
                raise RankError(f"rank {rank} ended with code {code}:\n" + "\n".join(lines[-15:]))
