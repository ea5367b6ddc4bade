"""Saves and finds checkpoints of a run, which are whole or not there at all.

A checkpoint is written to a hidden folder and gets its name when all ranks have written.  In the
background mode tensors are copied first, so training goes on while the copy is written.
"""

import contextlib
import json
import shutil
import sys
from concurrent.futures import Future
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torchrec.optim.keyed import KeyedOptimizer

from fusedrec_torchrec.checkpoint.load import LoadReport, load_checkpoint
from fusedrec_torchrec.checkpoint.save import (
    Planned,
    SaveError,
    partial_folder,
    publish,
    reason,
    write_checkpoint,
)
from fusedrec_torchrec.core.all_ranks import first_problem
from fusedrec_torchrec.core.terminal import human_bytes
from fusedrec_torchrec.training.run_state import RUN_STATE, RunState, find_checkpoints

__all__ = [
    "Checkpointer",
    "load_state",
]

SCHEDULES = "optimizer.state.__"


class Checkpointer:
    """Saves checkpoints of one run.

    Args:
        folder: where they go.
        keep: how many of the latest stay.
        asynchronous: whether to write in the background.
        stop_on_error: whether a save that fails ends the run; if not, it is reported.
        planned: how the model is sharded.
    """

    def __init__(
        self,
        folder: Path,
        keep: int,
        asynchronous: bool,
        stop_on_error: bool = True,
        planned: Planned | None = None,
    ) -> None:
        self._folder = folder
        self._keep = keep
        # Saving talks between ranks while training does: it needs its own group, on the CPU.
        self._group = dist.new_group(backend="gloo")
        self._asynchronous = asynchronous
        self._stop_on_error = stop_on_error
        self._planned = planned
        self._pending: tuple[Future[Any] | None, Path] | None = None
        self._problem: str | None = None
        self.failed = 0
        """Saves that failed."""
        if dist.get_rank() == 0:
            for left_over in [*folder.glob(".step_*.partial"), *folder.glob(".step_*.removed")]:
                shutil.rmtree(left_over, ignore_errors=True)

    def save(self, model: nn.Module, optimizer: KeyedOptimizer, state: RunState) -> None:
        """Saves a checkpoint; must be called on all ranks.

        It waits for the save before, if that is not done yet.

        Raises:
            SaveError: this save failed, or the one before it did in the background; on all ranks.
        """
        self.wait()
        path = self._folder / f"step_{state.step:08d}"
        if dist.get_rank() == 0:
            shutil.rmtree(partial_folder(path), ignore_errors=True)
        dist.barrier(group=self._group)
        try:
            future = write_checkpoint(
                partial_folder(path),
                model,
                optimizer,
                state.step,
                self._planned,
                {RUN_STATE: json.dumps(asdict(state))},
                self._group,
                self._asynchronous,
            )
        except BaseException as error:
            if isinstance(error, KeyboardInterrupt | SystemExit):
                raise
            self._failed(path, error)
            self.wait()
            return
        self._pending = (future, path)
        if not self._asynchronous:
            self.wait()

    def poll(self) -> None:
        """Gives a checkpoint its name if it is written by now; says nothing of an error yet."""
        if self._pending is not None:
            future, _ = self._pending
            if future is None or future.done():
                self._finish()

    def wait(self) -> None:
        """Waits until what was saved is there; must be called on all ranks.

        Raises:
            SaveError: it is not; on all ranks.
        """
        self._finish()
        problem = first_problem(self._problem, self._group)
        self._problem = None
        if problem is None:
            return
        self.failed += 1
        left = find_checkpoints(self._folder)
        last = f"the last complete one is {left[-1]}" if left else "there is no complete one"
        text = f"{problem}; {last}"
        if self._stop_on_error:
            raise SaveError(text)
        if dist.get_rank() == 0:
            print(f"warning: {text}", file=sys.stderr, flush=True)

    def let_finish(self) -> None:
        """Waits for a save that is under way, on this rank; before the run ends with an error."""
        self._finish()

    def _finish(self) -> None:
        if self._pending is None:
            return
        future, path = self._pending
        self._pending = None
        try:
            if future is not None:
                future.result()
            if dist.get_rank() == 0:
                self._publish(path)
        except BaseException as error:
            if isinstance(error, KeyboardInterrupt | SystemExit):
                raise
            self._failed(path, error)

    def _failed(self, path: Path, error: BaseException) -> None:
        self._problem = f"checkpoint {path} could not be saved: {reason(error)}"
        with contextlib.suppress(OSError):
            free = human_bytes(shutil.disk_usage(self._folder).free)
            self._problem += f" ({free} left on the disk)"
        if dist.get_rank() == 0:
            shutil.rmtree(partial_folder(path), ignore_errors=True)  # its room is needed

    def _publish(self, path: Path) -> None:
        publish(path)  # in place of one of an earlier attempt that stopped after it
        for old in find_checkpoints(self._folder)[: -self._keep]:
            _remove(old)


def _remove(path: Path) -> None:
    """Removes a checkpoint all at once: one that is half removed must not look like one."""
    going = path.with_name(f".{path.name}.removed")
    shutil.rmtree(going, ignore_errors=True)
    path.rename(going)
    shutil.rmtree(going)


def load_state(
    path: Path, model: nn.Module, optimizer: KeyedOptimizer, schedule: torch.Tensor
) -> LoadReport:
    """Loads weights and optimizer state; must be called on all ranks.

    ``schedule`` replaces the saved position in the learning-rate schedule, which may be another
    one now.
    """
    report = load_checkpoint(path, model, optimizer, verify=False, leave=SCHEDULES)
    state = optimizer.state_dict()
    for key, values in state["state"].items():
        if key.startswith("__"):
            values["warmup"] = schedule.clone()
    optimizer.load_state_dict(state)
    return report
