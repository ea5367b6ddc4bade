"""Ranks that are killed: the run goes on from its last checkpoint, as if nothing had been."""

import json
import os
import random
import re
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fusedrec_torchrec.core.config import from_mapping
from fusedrec_torchrec.training.config import TrainConfig
from fusedrec_torchrec.training.run_folder import claim, refuse_damaged
from fusedrec_torchrec.training.run_state import find_checkpoints
from fusedrec_torchrec.training.source import open_source
from tests.cli.command import fusedrec
from tests.cluster import Cluster
from tests.faults.restarts import (
    config,
    kill_ranks,
    output_of,
    ranks_of,
    same_end,
    start,
    wait_until,
)
from tests.training.runs import small, train


def survive(folder: Path, kills: int, steps: int, seed: int, **changes: Any) -> None:
    settings = {"steps": steps, "eval_every": 0, "checkpoint": {"every": 7, "keep": 2}, **changes}
    alone = fusedrec("train", "--config", config(folder / "alone", **settings))
    assert alone.returncode == 0, alone.stderr
    path = config(folder / "killed", launch={"max_restarts": kills}, **settings)
    process = start(path, "--overwrite")
    when = sorted(random.Random(seed).sample(range(1, steps - 1), kills))
    try:
        kill_ranks(folder / "killed", process, when, seed)
        process.wait(timeout=300)
    finally:
        process.kill()
    assert process.returncode == 0, output_of(folder / "killed")
    same_end(folder / "killed", folder / "alone")


def test_killed_once(tmp_path: Path) -> None:
    survive(tmp_path, kills=1, steps=40, seed=0)


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("sharding", ["fused_row_wise", "hot"])
def test_killed_twenty_times_at_random_steps(tmp_path: Path, sharding: str) -> None:
    hot = {"tables": {"b": {"ids": list(range(100))}}}
    survive(
        tmp_path,
        kills=20,
        steps=2000,
        seed=7,
        sharding={"hot": hot} if sharding == "hot" else {},
    )


@pytest.mark.slow
def test_a_damaged_checkpoint(tmp_path: Path) -> None:
    """Who resumes is offered the one before it; ranks that are started again take it."""
    settings = {"steps": 20, "eval_every": 0, "checkpoint": {"every": 10, "keep": 3}}
    path = config(tmp_path, **settings)
    assert fusedrec("train", "--config", path).returncode == 0
    first, last = find_checkpoints(tmp_path / "run" / "checkpoints")
    data = last / "__1_0.distcp"
    content = bytearray(data.read_bytes())
    content[len(content) // 2] ^= 4
    data.write_bytes(content)
    longer = ("--set", "steps=24")
    done = fusedrec("train", "--config", path, "--resume", *longer)
    assert done.returncode == 1
    assert re.search(
        rf"step_00000020 is damaged: __1_0.distcp is damaged.*--resume \S*{first.name}",
        done.stderr.splitlines()[-1],
    )
    done = fusedrec("train", "--config", path, "--resume", str(first), *longer)
    assert done.returncode == 0, done.stderr
    assert "10/24" in done.stderr


@pytest.mark.slow
def test_a_damaged_checkpoint_after_a_restart(tmp_path: Path) -> None:
    settings = {"steps": 600, "eval_every": 0, "checkpoint": {"every": 40, "keep": 5}}
    path = config(tmp_path / "run", launch={"max_restarts": 2}, **settings)
    process = start(path, cold_ranks=True)
    folder = tmp_path / "run" / "run" / "checkpoints"
    try:
        wait_until(process, lambda: len(find_checkpoints(folder)) >= 2)
        ranks = ranks_of(process)
        for rank in ranks:  # nobody may save another one in between
            os.kill(rank, signal.SIGSTOP)
        last = find_checkpoints(folder)[-1]
        (last / "plan.yaml").write_text("nonsense")
        for rank in ranks:
            os.kill(rank, signal.SIGKILL)
        process.wait(timeout=240)
    finally:
        process.kill()
    errors = output_of(tmp_path / "run")
    assert process.returncode == 0, errors
    assert (folder / f"damaged_{last.name}").is_dir()
    assert "plan.yaml has 8 bytes" in errors and "going on from" in errors
    assert find_checkpoints(folder)[-1].name == "step_00000600"


@pytest.mark.slow
def test_fewer_ranks_after_a_restart(tmp_path: Path) -> None:
    """Four, then two: the same batches, the same model up to the order of sums."""
    settings: dict[str, Any] = {"steps": 24, "eval_every": 12, "checkpoint": {"every": 12}}
    path = config(tmp_path, launch={"ranks": 4}, **settings)
    assert fusedrec("train", "--config", path).returncode == 0
    whole = json.loads((tmp_path / "run" / "summary.json").read_text())
    shutil.rmtree(tmp_path / "run" / "checkpoints" / "step_00000024")
    fewer = config(tmp_path, launch={"ranks": 2}, **settings)
    done = fusedrec("train", "--config", fewer, "--resume")
    assert done.returncode == 0, done.stderr
    assert "12/24" in done.stderr
    found = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert found["eval_log_loss"] == pytest.approx(whole["eval_log_loss"], rel=1e-4)
    converted = tmp_path / "for_three"
    done = fusedrec("checkpoint", "convert", tmp_path / "run", converted, "--world-size", "1")
    assert done.returncode == 0, done.stderr
    one = config(tmp_path, launch={"ranks": 1}, **{**settings, "steps": 30})
    done = fusedrec("train", "--config", one, "--resume", converted)
    assert done.returncode == 0, done.stderr
    assert "24/30" in done.stderr


@pytest.mark.slow
def test_fewer_ranks(clusters: Callable[[int], Cluster], tmp_path: Path) -> None:
    """Elastic restarts: from the same checkpoint on any number of ranks."""
    data = small(tmp_path / "run", checkpoint={"every": 12, "asynchronous": False})
    whole = clusters(4).run(train, data)[0]["result"]
    checkpoint = tmp_path / "run" / "checkpoints" / "step_00000012"
    for ranks in (2, 1, 4):
        folder = tmp_path / str(ranks)
        settings = {**data, "logging": {**data["logging"], "directory": str(folder)}}
        found = clusters(ranks).run(train, settings, str(checkpoint))[0]["result"]
        assert found["log_loss"] == pytest.approx(whole["log_loss"], rel=1e-4)


def test_what_is_said_of_a_damaged_checkpoint(tmp_path: Path, capsys: Any) -> None:
    settings = from_mapping(TrainConfig, small(tmp_path))
    for step in (5, 9):
        folder = tmp_path / "checkpoints" / f"step_{step:08d}"
        folder.mkdir(parents=True)
        (folder / "run.json").touch()
    first, last = find_checkpoints(tmp_path / "checkpoints")
    with pytest.raises(ValueError, match=f"it is damaged. The one before it: --resume {first}"):
        refuse_damaged(settings, last, False, "it is damaged")
    refuse_damaged(settings, last, True, "it is damaged")
    assert f"warning: it is damaged; going on from {first}" in capsys.readouterr().err
    assert find_checkpoints(tmp_path / "checkpoints") == [first]
    assert last.with_name("damaged_step_00000009").is_dir()  # set aside, not lost
    for restarted in (False, True):  # there is none before it: nobody begins anew unasked
        with pytest.raises(ValueError, match=r"it is damaged$"):
            refuse_damaged(settings, first, restarted, "it is damaged")
    assert find_checkpoints(tmp_path / "checkpoints") == [first]


def test_a_restart_deletes_nothing_that_was_set_aside(tmp_path: Path) -> None:
    settings = from_mapping(TrainConfig, small(tmp_path))
    kept = tmp_path / "checkpoints" / "damaged_step_00000009"
    kept.mkdir(parents=True)
    (tmp_path / "metrics.jsonl").touch()
    (tmp_path / ".job").write_text("job")
    with pytest.raises(ValueError, match=r"no checkpoint left.*damaged_step_00000009"):
        claim(settings, open_source(settings), "latest", False, "job")
    assert kept.is_dir() and (tmp_path / "metrics.jsonl").is_file()


HANG = """
import os, signal, sys
from unittest import mock
from fusedrec_torchrec.exchange.lookup import FusedLookup
from fusedrec_torchrec.training.bad_batches import _Statuses
from fusedrec_torchrec.training.main import main

owner, name = {"rows": (FusedLookup, "forward"), "batch check": (_Statuses, "__init__")}[STAGE]
if os.environ["RANK"] == "1":
    original, calls = getattr(owner, name), []

    def late(*arguments):
        calls.append(1)
        if len(calls) > 10:
            signal.pause()
        return original(*arguments)

    setattr(owner, name, late)
sys.argv = ["train", *sys.argv[1:]]
main()
"""


@pytest.mark.slow
@pytest.mark.parametrize("stage", ["rows", "batch check"])
def test_a_rank_that_hangs_ends_the_run_with_its_name(tmp_path: Path, stage: str) -> None:
    from tests.cli.command import torchrun

    (tmp_path / "hang.py").write_text(f"STAGE = {stage!r}\n{HANG}")
    path = config(tmp_path, launch={"timeout_seconds": 4}, steps=50, eval_every=0)
    done = torchrun("--nproc-per-node=2", str(tmp_path / "hang.py"), "--config", str(path))
    assert done.returncode != 0
    assert f"stage {stage!r}: rank 1 did not answer in time; rank 0 waited for it" in done.stderr
