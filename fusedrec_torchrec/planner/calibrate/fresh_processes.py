"""Measurements in processes that have nothing behind them.

What an allocator has learned from one workload's tensors changes the times of the next one; in
training there is no other.  So each measurement forks a process of its own, with a process group of
its own; only libraries are there already.
"""

import json
import os
import sys
import traceback
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from fusedrec_torchrec.compat.stores import FileStore, PrefixStore, Store, TCPStore

__all__ = ["FreshProcesses"]

TIMEOUT = timedelta(minutes=10)


class FreshProcesses:
    """Runs functions as one rank of a process group, each in a new process.

    Call it on all ranks, with the same functions in the same order, from a process without a
    process group, threads or CUDA.

    Args:
        rank: of this process.
        ranks: of all.
        backend: of the process groups.
        store: file for the ranks to meet; MASTER_ADDR and MASTER_PORT if None.
    """

    def __init__(self, rank: int, ranks: int, backend: str, store: str | None) -> None:
        self._rank, self._ranks, self._backend, self._store = rank, ranks, backend, store
        self._turn = 0
        agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        if store is None and rank == 0 and not agent:
            self._server = self._connect(is_master=True)

    def _connect(self, is_master: bool = False) -> Store:
        host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        return TCPStore(host, port, is_master=is_master, timeout=TIMEOUT, wait_for_workers=False)

    def __call__(self, function: Callable[[], Any]) -> Any:
        """Returns what the function returns, which JSON can hold.

        Raises:
            RuntimeError: it failed; its own error stands on standard error.
        """
        self._turn += 1
        read, write = os.pipe()
        sys.stdout.flush()
        child = os.fork()
        if not child:
            os.close(read)
            self._work(function, write)
        os.close(write)
        with os.fdopen(read) as pipe:
            text = pipe.read()
        _, status = os.waitpid(child, 0)
        if status or not text:
            raise RuntimeError(f"a measurement failed on rank {self._rank}")
        return json.loads(text)

    def _work(self, function: Callable[[], Any], write: int) -> None:
        """Runs the function in the new process, which ends here."""
        code = 1
        try:
            store: Store
            if self._store is not None:
                store = FileStore(f"{self._store}_{self._turn}", self._ranks)
            else:
                store = PrefixStore(f"fresh {self._turn}", self._connect())
            dist.init_process_group(
                self._backend,
                store=store,
                rank=self._rank,
                world_size=self._ranks,
                timeout=TIMEOUT,
            )
            result = function()
            with os.fdopen(write, "w") as pipe:
                json.dump(result, pipe)
            dist.barrier()
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stderr.flush()
            os._exit(code)
