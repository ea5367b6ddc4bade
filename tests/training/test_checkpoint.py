"""Saving in the background: published when whole, one after another, errors not swallowed."""

from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torchrec.optim.keyed import KeyedOptimizerWrapper

from fusedrec_torchrec.checkpoint import save as module
from fusedrec_torchrec.checkpoint.file_names import MANIFEST
from fusedrec_torchrec.training.checkpoint import Checkpointer
from fusedrec_torchrec.training.run_state import RunState, find_checkpoints
from tests.cluster import Cluster


class Later:
    """Stands for torch's background save: finishes when told to."""

    def __init__(self) -> None:
        self.futures: list[Future[None]] = []

    def __call__(self, tensors: Any, *, storage_writer: Any, **_: Any) -> Future[None]:
        (Path(storage_writer.path) / MANIFEST).touch()
        self.futures.append(Future())
        return self.futures[-1]


def save_in_the_background(folder: Path) -> list[Any]:
    model = nn.Linear(2, 2)
    optimizer = KeyedOptimizerWrapper(
        dict(model.named_parameters()), lambda p: torch.optim.SGD(p, lr=0.1)
    )
    later = Later()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "async_save", later)
        (folder / ".step_00000001.partial").mkdir(parents=True)
        (folder / ".step_00000001.partial" / "stray").touch()
        checkpointer = Checkpointer(folder, keep=2, asynchronous=True)
        seen: list[Any] = [sorted(p.name for p in folder.iterdir())]

        def save(step: int) -> None:
            checkpointer.save(model, optimizer, RunState(step, [], {}, {}, 1))

        save(1)
        checkpointer.poll()
        seen.append([p.name for p in find_checkpoints(folder)])
        later.futures[0].set_result(None)
        checkpointer.poll()
        seen.append([p.name for p in find_checkpoints(folder)])
        save(2)
        later.futures[1].set_result(None)
        save(3)  # publishes the one before it
        seen.append([p.name for p in find_checkpoints(folder)])
        later.futures[2].set_result(None)
        checkpointer.wait()
        seen.append([p.name for p in find_checkpoints(folder)])
        save(4)
        later.futures[3].set_exception(OSError("disk full"))
        try:
            checkpointer.wait()
        except RuntimeError as error:
            seen.append(str(error))
        seen.append([p.name for p in find_checkpoints(folder)])
        return seen


def test_checkpoints_are_published_when_they_are_whole(cluster_1: Cluster, tmp_path: Path) -> None:
    start, pending, first, second, third, error, left = cluster_1.run(
        save_in_the_background, tmp_path
    )[0]
    assert start == []  # what a crash left is gone
    assert pending == []
    assert first == ["step_00000001"]
    assert second == ["step_00000001", "step_00000002"]
    assert third == ["step_00000002", "step_00000003"]  # keeps two
    assert "step_00000004 could not be saved: disk full" in error
    assert left == third
