"""Checkpoints go from one TorchRec to the other and back, to the last bit: ``make test-stacks``."""

import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.checkpoint.stacks import MODELS, NUMBERS, TRAINING

ROOT = Path(__file__).parents[2]
PYTHONS = {
    "1.8": ROOT / ".venv" / "bin" / "python",
    "1.9": ROOT / ".venv-1.9" / "bin" / "python",
}

VERSION = "from importlib.metadata import version; print(version('torchrec'))"

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not all(python.exists() for python in PYTHONS.values()),
        reason="needs both environments: make setup, make setup STACK=1.9",
    ),
]


def run(stack: str, *arguments: str | Path) -> str:
    command = [str(PYTHONS[stack]), *map(str, arguments)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def flat(value: Any, name: str = "") -> dict[str, torch.Tensor]:
    """All tensors of nested numbers by where they are."""
    if isinstance(value, torch.Tensor):
        return {name: value}
    items = value.items() if isinstance(value, dict) else enumerate(value)
    return {k: v for key, item in items for k, v in flat(item, f"{name}/{key}").items()}


@pytest.mark.parametrize(("first", "second"), [("1.8", "1.9"), ("1.9", "1.8")])
def test_weights_and_optimizer_state_are_the_same_bits(
    tmp_path: Path, first: str, second: str
) -> None:
    for stack in (first, second):
        assert run(stack, "-c", VERSION).startswith(f"{stack}.")
    run(first, "-m", "tests.checkpoint.stacks", "save", tmp_path)
    run(second, "-m", "tests.checkpoint.stacks", "load", tmp_path, tmp_path / "loaded.pt")
    saved, loaded = torch.load(tmp_path / NUMBERS), torch.load(tmp_path / "loaded.pt")
    assert saved.keys() == loaded.keys() == {*MODELS, TRAINING}
    for name in saved:
        want, got = flat(saved[name]), flat(loaded[name])
        assert want and want.keys() == got.keys(), name
        for where, tensor in want.items():
            assert torch.equal(got[where].view(tensor.shape), tensor), f"{name}: {where}"
