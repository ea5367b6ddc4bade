"""The demo runs as the README says and learns something."""

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_demo_trains_on_two_ranks() -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", "2", "examples/dlrm/demo.py", "--steps", "60"]
    done = subprocess.run(
        command,
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    assert re.search(r"table_0: fused_row_wise", done.stdout)
    assert float(re.search(r"AUC on held-out clicks\s+([\d.]+)", done.stdout).group(1)) > 0.7  # type: ignore[union-attr]
    assert float(re.search(r"loss on held-out clicks\s+([\d.]+)", done.stdout).group(1)) < 0.65  # type: ignore[union-attr]
    assert re.search(r"samples/s\s+\d+", done.stdout)
    assert re.search(r"all-to-alls per step\s+3 with [\d.]+ KiB", done.stdout)
    assert re.search(r"all-reduces per step\s+1 with [\d.]+ KiB", done.stdout)
    assert "60/60" in done.stderr  # the progress bar


def test_demo_refuses_too_few_steps() -> None:
    done = subprocess.run(
        [sys.executable, "examples/dlrm/demo.py", "--steps", "3"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 2
    assert "--steps must be at least 20" in done.stderr
