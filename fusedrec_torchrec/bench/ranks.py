"""Starts the processes of a system, and asks all of them at once."""

import json
import os
import selectors
import subprocess
import sys
import tempfile
from pathlib import Path
from types import TracebackType
from typing import Any

from fusedrec_torchrec.bench.allocators import Allocator, allocator_environment
from fusedrec_torchrec.bench.links import Host
from fusedrec_torchrec.bench.suite import SuiteConfig, WorkloadConfig
from fusedrec_torchrec.core.config import to_mapping

__all__ = ["RankError", "Ranks", "environment"]

SHOWN_LINES = 15


class RankError(RuntimeError):
    """A rank of a benchmark ended with an error; the text is its own."""


class Ranks:
    """Runs all ranks of one system, each a process of its own; they end with the context.

    Args:
        system: name of the system.
        suite: how to measure.
        workload: what to measure.
        prepared: folder of the prepared data that the workload is on; None if it is on none.
        hosts: where each rank runs.
        allocator: how the processes keep memory.
    """

    def __init__(
        self,
        system: str,
        suite: SuiteConfig,
        workload: WorkloadConfig,
        prepared: str | None,
        hosts: list[Host],
        allocator: Allocator = "default",
    ) -> None:
        self.system = system
        self._folder = tempfile.TemporaryDirectory()
        job_file = Path(self._folder.name) / "job.json"
        job = {
            "system": system,
            "suite": to_mapping(suite),
            "workload": to_mapping(workload),
            "prepared": prepared,
            "store": f"{self._folder.name}/store",
        }
        job_file.write_text(json.dumps(job))
        self._processes: list[subprocess.Popen[str]] = []
        for rank, host in enumerate(hosts):
            command = [*host.prefix, sys.executable, "-m", "fusedrec_torchrec.bench.rank"]
            variables = environment(rank, workload.ranks, suite.threads, host.interface)
            with self._errors(rank).open("w") as errors:
                self._processes.append(
                    subprocess.Popen(
                        [*command, str(job_file)],
                        env=allocator_environment(allocator, variables),
                        stdin=subprocess.PIPE,
                        stdout=subprocess.PIPE,
                        stderr=errors,
                        text=True,
                    )
                )

    def __enter__(self) -> "Ranks":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        for process in self._processes:
            process.kill()
            process.communicate()
        self._folder.cleanup()

    def wait_until_ready(self) -> None:
        """Waits until models are built and warm on all ranks."""
        self._answers()

    def ask(self, command: str, **arguments: Any) -> list[Any]:
        """Returns what each rank answers to a command of ``rank.Rank``."""
        line = json.dumps([command, arguments])
        for process in self._processes:
            assert process.stdin is not None
            try:
                print(line, file=process.stdin, flush=True)
            except BrokenPipeError:
                break  # its answer, or rather the lack of it, tells why
        return [json.loads(answer) for answer in self._answers()]

    def _answers(self) -> list[str]:
        """Returns a line of each rank, as soon as all have answered or one has ended."""
        answers = [""] * len(self._processes)
        with selectors.DefaultSelector() as waiting:
            for rank, process in enumerate(self._processes):
                assert process.stdout is not None
                waiting.register(process.stdout, selectors.EVENT_READ, (rank, process.stdout))
            while waiting.get_map():
                for key, _ in waiting.select():
                    rank, stream = key.data
                    answers[rank] = stream.readline()
                    if not answers[rank]:
                        self._fail()
                    waiting.unregister(stream)
        return answers

    def _fail(self) -> None:
        """Raises the error of the first rank that ended by itself."""
        for process in self._processes:
            try:
                process.wait(timeout=5)
            except subprocess.TimeoutExpired:
                continue
        codes = [process.poll() for process in self._processes]
        rank = next(i for i, code in enumerate(codes) if code is not None)
        text = self._errors(rank).read_text().strip().splitlines()[-SHOWN_LINES:]
        raise RankError(
            f"{self.system}: rank {rank} ended with code {codes[rank]}:\n" + "\n".join(text)
        )

    def _errors(self, rank: int) -> Path:
        return Path(self._folder.name) / f"rank_{rank}.err"


def environment(rank: int, ranks: int, threads: int, interface: str) -> dict[str, str]:
    """Returns the environment of a process that is one of several ranks."""
    return {
        **os.environ,
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
        "GLOO_SOCKET_IFNAME": interface,
        "OMP_NUM_THREADS": str(threads),
    }
