"""The CPU stack is tested on CPU, also where its torch is a CUDA build and finds GPUs."""

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[1]
# What torch's CUDA build says on a machine with two GPUs.
PLUGIN = """
import os
import torch

torch.cuda.device_count = lambda: 0 if os.environ.get("CUDA_VISIBLE_DEVICES") == "" else 2
torch.cuda.is_available = lambda: torch.cuda.device_count() > 0
"""
TESTS = (
    "tests/core/gpu/test_touched.py::test_means_of_no_rows_change_nothing",
    "tests/core/gpu/test_slots.py::test_nothing_is_overrun_if_lengths_are_wrong",
)


@pytest.mark.skipif(torch.cuda.is_available(), reason="for the CPU stack")
@pytest.mark.skipif(find_spec("triton") is None, reason="needs Triton")
def test_gpus_of_the_machine_are_not_used(tmp_path: Path) -> None:
    (tmp_path / "two_gpus.py").write_text(PLUGIN)
    left_out = ("TRITON_INTERPRET", "CUDA_VISIBLE_DEVICES")
    environment = {k: v for k, v in os.environ.items() if k not in left_out}
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), str(tmp_path)])
    command = [sys.executable, "-m", "pytest", "-p", "two_gpus", "-p", "no:cacheprovider", *TESTS]
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=280
    )
    assert done.returncode == 0, done.stdout
    assert "17 passed" in done.stdout
