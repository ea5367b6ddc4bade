"""Checkpoints of a run with torch.distributed.checkpoint: whole or not there at all.

A checkpoint is written to a hidden folder and gets its name when all ranks have written.  In the
background mode tensors are copied first, so training goes on while the copy is written.
"""

import json
import re
import shutil
from concurrent.futures import Future
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.staging import BlockingAsyncStager
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import async_save, save
from torchrec.optim.keyed import KeyedOptimizer

__all__ = ["Checkpointer", "RunState", "find_checkpoints", "load_state", "read_run_state"]

RUN_STATE = "run.json"
VERSION = 1


@dataclass(frozen=True)
class RunState:
    """What a run needs besides weights and optimizer state to go on as if it had not stopped.

    Attributes:
        step: steps done, which is also the position in the data.
        sums: of the training metrics since the last record, of every rank.
        config: the configuration of the run, as YAML holds it.
        data: identity of the data.
        world_size: ranks that wrote the checkpoint.
        rates: how hot and cold batches alternated so far, and the losses that decide on it.
        version: of this format.
    """

    step: int
    sums: list[list[float]]
    config: dict[str, Any]
    data: dict[str, Any]
    world_size: int
    rates: dict[str, Any] | None = None
    version: int = VERSION


def find_checkpoints(folder: Path) -> list[Path]:
    """Complete checkpoints, the latest last."""
    found = [p for p in folder.glob("step_*") if re.fullmatch(r"step_\d+", p.name)]
    return sorted((p for p in found if (p / RUN_STATE).is_file()), key=lambda p: int(p.name[5:]))


def read_run_state(path: Path) -> RunState:
    """
    Raises:
        ValueError: no checkpoint there, or a damaged one, or of another version.
    """
    try:
        state = RunState(**json.loads((path / RUN_STATE).read_text()))
    except (FileNotFoundError, NotADirectoryError):
        raise ValueError(f"{path} is no checkpoint of a run ({RUN_STATE} is missing)") from None
    except (json.JSONDecodeError, TypeError) as error:
        raise ValueError(f"{path / RUN_STATE} is damaged: {error}") from None
    if state.version != VERSION:
        raise ValueError(
            f"{path} has version {state.version}, this release reads version {VERSION}"
        )
    return state


class Checkpointer:
    """Saves checkpoints of one run.

    Args:
        folder: where they go.
        keep: how many of the latest stay.
        asynchronous: whether to write in the background.
    """

    def __init__(self, folder: Path, keep: int, asynchronous: bool) -> None:
        self._folder = folder
        self._keep = keep
        # Saving talks between ranks while training does: it needs its own group, on the CPU.
        self._group = dist.new_group(backend="gloo")
        self._asynchronous = asynchronous
        self._pending: tuple[Future[Any], Path] | None = None
        if dist.get_rank() == 0:
            for left_over in [*folder.glob(".step_*.partial"), *folder.glob(".step_*.removed")]:
                shutil.rmtree(left_over)

    def save(self, model: nn.Module, optimizer: KeyedOptimizer, state: RunState) -> None:
        """Must be called on all ranks.  Waits for the save before, if that is not done yet."""
        self.wait()
        path = self._folder / f"step_{state.step:08d}"
        partial = self._folder / f".{path.name}.partial"
        if dist.get_rank() == 0:
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir(parents=True)
            (partial / RUN_STATE).write_text(json.dumps(asdict(state)))
        dist.barrier(group=self._group)
        tensors = _tensors(model, optimizer)
        if self._asynchronous:
            future = async_save(
                tensors,
                checkpoint_id=partial,
                process_group=self._group,
                async_stager=BlockingAsyncStager(),  # the default one cannot copy ShardedTensor
            )
            assert isinstance(future, Future)
            self._pending = (future, path)
        else:
            save(tensors, checkpoint_id=partial, process_group=self._group)
            self._publish(path)

    def poll(self) -> None:
        """Gives a save its name if it is done by now."""
        if self._pending is not None and self._pending[0].done():
            self.wait()

    def wait(self) -> None:
        """Waits until what was saved is there."""
        if self._pending is not None:
            future, path = self._pending
            self._pending = None
            try:
                future.result()
            except BaseException as error:
                raise RuntimeError(f"checkpoint {path} could not be saved: {error}") from error
            self._publish(path)

    def _publish(self, path: Path) -> None:
        if dist.get_rank() != 0:
            return
        _remove(path)  # of an earlier attempt that stopped after it
        (self._folder / f".{path.name}.partial").rename(path)
        for old in find_checkpoints(self._folder)[: -self._keep]:
            _remove(old)


def _remove(path: Path) -> None:
    """All at once: a checkpoint half removed must not look like one."""
    if path.exists():
        going = path.with_name(f".{path.name}.removed")
        shutil.rmtree(going, ignore_errors=True)
        path.rename(going)
        shutil.rmtree(going)


def load_state(
    path: Path, model: nn.Module, optimizer: KeyedOptimizer, schedule: torch.Tensor
) -> None:
    """Loads weights and optimizer state; must be called on all ranks.

    ``schedule`` replaces the saved position in the learning-rate schedule, which may be another
    one now.
    """
    tensors = _tensors(model, optimizer)
    load(tensors, checkpoint_id=path)
    for key, state in tensors["optimizer"]["state"].items():
        if key.startswith("__"):
            state["warmup"] = schedule.clone()
    model.load_state_dict(tensors["model"])
    optimizer.load_state_dict(tensors["optimizer"])


def _tensors(model: nn.Module, optimizer: KeyedOptimizer) -> dict[str, Any]:
    return {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
