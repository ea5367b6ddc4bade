"""Runs from the command line that are killed, and what they leave."""

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
import yaml

from fusedrec_torchrec.checkpoint.contents import Contents
from fusedrec_torchrec.training.logs import read_log
from fusedrec_torchrec.training.run_state import find_checkpoints
from tests.cli.command import ROOT
from tests.training.runs import small
from tests.warm import interpreter

DEADLINE_SECONDS = 300


def config(folder: Path, **changes: Any) -> Path:
    data = small(folder / "run", **changes)
    data["logging"]["log_every"] = 1
    folder.mkdir(exist_ok=True)
    path = folder / "config.yaml"
    path.write_text(yaml.safe_dump(data))
    return path


def start(path: Path, *arguments: str, cold_ranks: bool = False) -> subprocess.Popen[str]:
    """Cold ranks may be stopped, warm ones only killed."""
    command = [sys.executable, "-m", "fusedrec_torchrec.cli.main", "train", "--config", str(path)]
    # Into a file: nobody reads a pipe while the run goes on, and a full one would stop it.
    with (path.parent / "output.txt").open("w") as output:
        return subprocess.Popen(
            [*command, *arguments],
            cwd=ROOT,
            env=os.environ if cold_ranks else {**os.environ, "PYTHON_EXEC": interpreter()},
            stdout=output,
            stderr=output,
            text=True,
            start_new_session=True,
        )


def output_of(folder: Path) -> str:
    return (folder / "output.txt").read_text()


def ranks_of(process: subprocess.Popen[str]) -> list[int]:
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text()
    return [int(child) for child in children.split()]


def wait_until(process: subprocess.Popen[str], done: Any) -> None:
    deadline = time.monotonic() + DEADLINE_SECONDS
    while not done():
        assert process.poll() is None, "it ended by itself"
        assert time.monotonic() < deadline
        time.sleep(0.02)


def steps_done(folder: Path) -> int:
    records = read_log(folder / "run")
    return int(records[-1]["step"]) if records else 0


def kill_ranks(folder: Path, process: subprocess.Popen[str], steps: list[int], seed: int) -> None:
    """Kills a random rank each time the run comes to one of the steps."""
    chance = random.Random(seed)
    for step in steps:
        wait_until(process, lambda step=step: steps_done(folder) >= step)
        ranks = ranks_of(process)
        os.kill(chance.choice(ranks), signal.SIGKILL)
        # Until the launcher has noticed: it starts all ranks again.
        wait_until(process, lambda ranks=ranks: not set(ranks) & set(ranks_of(process)))


def last_state(folder: Path) -> tuple[str, dict[str, torch.Tensor]]:
    """All tensors of a run's last checkpoint."""
    path = find_checkpoints(folder / "run" / "checkpoints")[-1]
    reader = Contents(path).reader
    return path.name, {name: reader.whole(name) for name in reader.tensors}


def same_end(folder: Path, other: Path) -> None:
    """Both runs ended with the same weights and optimizer state, to the last bit."""
    (name, got), (wanted_name, want) = last_state(folder), last_state(other)
    assert name == wanted_name and got.keys() == want.keys()
    for key, tensor in want.items():
        assert torch.equal(got[key], tensor), key
