"""Saves that fail: full disks, folders that disappear, ranks that die while saving."""

import os
import shutil
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from fusedrec_torchrec.checkpoint.save import SaveError
from fusedrec_torchrec.checkpoint.verify import verify
from fusedrec_torchrec.checkpoint.writer import CheckedWriter
from fusedrec_torchrec.training.logs import read_log
from fusedrec_torchrec.training.run_state import find_checkpoints
from tests.cluster import Cluster
from tests.training.runs import small, train

EVERY, STEPS = 4, 12


def config(folder: Path | str, **checkpoint: Any) -> dict[str, Any]:
    data = small(folder)
    data["steps"], data["eval_every"] = STEPS, 0
    data["checkpoint"] = {"every": EVERY, "keep": 2, "asynchronous": False, **checkpoint}
    return data


def names(folder: Path) -> list[str]:
    return [path.name for path in find_checkpoints(folder / "checkpoints")]


def train_and_die(data: dict[str, Any], at_save: int) -> None:
    """Rank 1 is killed when it has written half of a checkpoint."""
    saves: list[int] = []
    original = CheckedWriter.write_data

    def write(self: Any, plan: Any, planner: Any) -> Any:
        saves.append(1)
        if dist.get_rank() == 1 and len(saves) == at_save:
            (Path(self.path) / "__1_0.distcp").write_bytes(b"half of it")
            os.kill(os.getpid(), signal.SIGKILL)
        return original(self, plan, planner)

    with mock.patch.object(CheckedWriter, "write_data", write):
        train(data)


@pytest.mark.parametrize("asynchronous", [pytest.param(False, marks=pytest.mark.slow), True])
def test_killed_while_saving(cluster_2: Cluster, tmp_path: Path, asynchronous: bool) -> None:
    data = config(tmp_path / "run", asynchronous=asynchronous)
    cluster = Cluster(2, timeout=20)
    try:
        with pytest.raises(AssertionError, match="rank 1 died"):
            cluster.run(train_and_die, data, 2)
    finally:
        cluster.stop(kill=True)
    run = tmp_path / "run"
    assert names(run) == ["step_00000004"]  # the last good one
    assert verify(run / "checkpoints" / "step_00000004") == []
    # Rank 0 has seen it and cleaned up, or it was stopped before it could.
    left = {p.name for p in (run / "checkpoints").glob(".*")}
    assert left <= {".step_00000008.partial"}
    resumed = cluster_2.run(train, data, str(run / "checkpoints" / "step_00000004"))
    assert not list((run / "checkpoints").glob(".*"))
    want = cluster_2.run(train, config(tmp_path / "alone"))
    for got, wanted in zip(resumed, want, strict=True):
        for name, tensor in wanted["state"].items():
            assert torch.equal(got["state"][name], tensor)


def test_saving_in_the_background_changes_nothing(cluster_2: Cluster, tmp_path: Path) -> None:
    """Neither the training nor what is saved."""
    from fusedrec_torchrec.checkpoint.reader import CheckpointReader

    found = {}
    for asynchronous in (False, True):
        folder = tmp_path / str(asynchronous)
        found[asynchronous] = cluster_2.run(
            train, config(folder, asynchronous=asynchronous, keep=9)
        )
        assert names(folder) == ["step_00000004", "step_00000008", "step_00000012"]
    for got, want in zip(*found.values(), strict=True):
        for name, tensor in want["state"].items():
            assert torch.equal(got["state"][name], tensor)
    for step in names(tmp_path / "True"):
        readers = [CheckpointReader(tmp_path / k / "checkpoints" / step) for k in ("True", "False")]
        for name in readers[0].tensors:
            assert torch.equal(*(reader.whole(name) for reader in readers)), (step, name)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "disk"
    folder.mkdir()
    # One checkpoint of about 140 KB fits, two do not.
    command = ["mount", "-t", "tmpfs", "-o", "size=320k", "tmpfs", str(folder)]
    try:
        subprocess.run(command, check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("mounting needs root")
    yield folder
    subprocess.run(["umount", "--lazy", str(folder)], check=True)


def error_of(data: dict[str, Any]) -> str:
    try:
        train(data)
    except SaveError as error:
        return str(error)
    return "nothing happened"


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_full_disk_stops_all_ranks_and_leaves_the_last_checkpoint(
    cluster_2: Cluster, small_disk: Path, asynchronous: bool
) -> None:
    first, second = cluster_2.run(error_of, config(small_disk, asynchronous=asynchronous))
    assert first == second
    assert "step_00000008 could not be saved: " in first
    assert "left on the disk" in first
    assert first.endswith("step_00000004") and "the last complete one is" in first
    assert names(small_disk) == ["step_00000004"]
    assert verify(small_disk / "checkpoints" / "step_00000004") == []
    assert not list((small_disk / "checkpoints").glob(".*"))  # room for the next try


def test_a_full_disk_need_not_stop_training(
    cluster_2: Cluster, small_disk: Path, tmp_path: Path
) -> None:
    found = cluster_2.run(train, config(small_disk, on_error="warn"))
    want = cluster_2.run(train, config(tmp_path / "alone"))
    for got, wanted in zip(found, want, strict=True):
        for name, tensor in wanted["state"].items():
            assert torch.equal(got["state"][name], tensor)
    assert names(small_disk) == ["step_00000004"]
    records = [r for r in read_log(small_disk) if r["kind"] == "train"]
    assert records[-1]["failed_saves"] == 1  # of the record, the last one comes after it


def remove_while_saving(data: dict[str, Any]) -> str:
    saves: list[int] = []
    original = CheckedWriter.write_data

    def write(self: Any, plan: Any, planner: Any) -> Any:
        saves.append(1)
        if len(saves) == 2:
            dist.barrier()
            if dist.get_rank() == 0:
                shutil.rmtree(Path(self.path))
            dist.barrier()
        return original(self, plan, planner)

    with mock.patch.object(CheckedWriter, "write_data", write):
        return error_of(data)


def test_a_folder_that_disappears_while_saving(cluster_2: Cluster, tmp_path: Path) -> None:
    data = config(tmp_path)
    first, second = cluster_2.run(remove_while_saving, data)
    assert first == second
    assert "step_00000008 could not be saved: " in first
    assert first.endswith("step_00000004")


def remove_between(data: dict[str, Any], folder: str) -> str:
    from fusedrec_torchrec.training.loop import Training

    original = Training._save

    def save(self: Any) -> None:
        if self.step == 2 * EVERY:
            dist.barrier()
            if dist.get_rank() == 0:
                shutil.rmtree(Path(folder) / "checkpoints")
            dist.barrier()
        original(self)

    with mock.patch.object(Training, "_save", save):
        return error_of(data)


def test_a_folder_that_disappeared_is_made_again(cluster_2: Cluster, tmp_path: Path) -> None:
    assert (
        cluster_2.run(remove_between, config(tmp_path), str(tmp_path)) == ["nothing happened"] * 2
    )
    assert names(tmp_path) == ["step_00000008", "step_00000012"]
