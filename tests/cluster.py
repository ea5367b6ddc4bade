"""Real processes with a gloo process group, kept alive between tests.

Starting a process costs seconds of imports, a test milliseconds: a ``Cluster`` starts its ranks
once and runs module-level functions on all of them.  Ranks are forked from a server that has
imported everything already, so that starting them anew, after a test that failed on one of them,
takes no time.  The server itself has no threads and no process group.
"""

import multiprocessing as mp
import os
import tempfile
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from tests.emulated_cuda import install, is_emulated
from tests.warm.forks import CONTEXT

SLOWER = "FUSEDREC_TESTS_SLOWER"  # how many times as long everything takes, as under a sanitizer
TIMES = float(os.environ.get(SLOWER, "1"))
TIMEOUT_SECONDS = 120 * TIMES


class RankError(AssertionError):
    """A function failed on at least one rank; the text holds every rank's traceback."""


def _rank_main(
    rank: int, world_size: int, backend: str, timeout: float, store: str, pipe: Connection
) -> None:
    os.environ.update(
        {
            "RANK": str(rank),
            "WORLD_SIZE": str(world_size),
            "LOCAL_RANK": str(rank),
            "LOCAL_WORLD_SIZE": str(world_size),
            "GLOO_SOCKET_IFNAME": "lo",
        }
    )
    import gc
    import logging

    import torch
    import torch.distributed as dist

    gc.freeze()  # no collection looks at all that was imported, which would also copy it
    logging.getLogger("torchrec").setLevel(logging.ERROR)
    logging.getLogger().setLevel(logging.ERROR)
    torch.set_num_threads(1)
    if backend == "nccl":
        if is_emulated():
            install()
        torch.cuda.set_device(rank)
    dist.init_process_group(
        backend,
        init_method=f"file://{store}",
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=timeout),
    )
    while (job := pipe.recv()) is not None:
        function, args, kwargs = job
        try:
            pipe.send((True, function(*args, **kwargs)))
        except BaseException:
            pipe.send((False, traceback.format_exc()))
    dist.destroy_process_group()


class Cluster:
    """``world_size`` processes in one group, whose collectives end after ``timeout`` seconds."""

    def __init__(self, world_size: int, backend: str = "gloo", timeout: float = 60) -> None:
        self.world_size = world_size
        self._backend = backend
        self._timeout = timeout * TIMES
        self._processes: list[mp.process.BaseProcess] = []
        self._pipes: list[Connection] = []

    def start(self) -> None:
        import torch

        # CUDA cannot be used in forks of a process that has looked at it, not even to copy to CPU.
        context: Any = mp.get_context("spawn") if torch.cuda.is_available() else CONTEXT
        self._directory = tempfile.TemporaryDirectory()
        store = str(Path(self._directory.name) / "store")
        for rank in range(self.world_size):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=_rank_main,
                args=(rank, self.world_size, self._backend, self._timeout, store, theirs),
                daemon=True,
            )
            process.start()
            self._processes.append(process)
            self._pipes.append(ours)

    def run(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> list[Any]:
        """Runs a module-level function on every rank; returns the results by rank."""
        if not self._processes:
            self.start()
        for pipe in self._pipes:
            pipe.send((function, args, kwargs))
        answers = []
        for rank, pipe in enumerate(self._pipes):
            if not pipe.poll(TIMEOUT_SECONDS):
                self.stop(kill=True)
                raise RankError(f"rank {rank} did not answer within {TIMEOUT_SECONDS} s")
            try:
                answers.append(pipe.recv())
            except EOFError:
                self.stop(kill=True)
                raise RankError(f"rank {rank} died") from None
        failures = [f"rank {r}:\n{text}" for r, (ok, text) in enumerate(answers) if not ok]
        if failures:
            self.stop(kill=True)  # ranks may be out of step now
            raise RankError("\n".join(failures))
        return [result for _, result in answers]

    def stop(self, kill: bool = False) -> None:
        for process, pipe in zip(self._processes, self._pipes, strict=True):
            if kill:
                process.kill()
            else:
                pipe.send(None)
        for process in self._processes:
            process.join(10 * TIMES)
            if process.is_alive():
                process.kill()
        if self._processes:
            self._directory.cleanup()
        self._processes, self._pipes = [], []
