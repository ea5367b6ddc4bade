"""Runs the ``fusedrec`` command as a user does."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def fusedrec(*arguments: object, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    """In a process of its own."""
    return python("-m", "fusedrec_torchrec.cli.main", *arguments, cwd=cwd)


def torchrun(*arguments: object, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    return python("-m", "torch.distributed.run", *arguments, cwd=cwd)


def python(*arguments: object, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *map(str, arguments)],
        cwd=cwd,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
