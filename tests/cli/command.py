"""Runs the ``fusedrec`` command as a user does."""

import os
import subprocess
import sys
from pathlib import Path

from tests.warm import interpreter

ROOT = Path(__file__).parents[2]


def fusedrec(
    *arguments: object, cwd: Path = ROOT, cold: bool = False
) -> subprocess.CompletedProcess[str]:
    """In a process of its own; a cold one imports everything by itself, and so do its ranks."""
    return python("-m", "fusedrec_torchrec.cli.main", *arguments, cwd=cwd, cold=cold)


def torchrun(*arguments: object, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    return python("-m", "torch.distributed.run", *arguments, cwd=cwd)


def python(
    *arguments: object,
    cwd: Path = ROOT,
    cold: bool = False,
    environment: dict[str, str] | None = None,
) -> subprocess.CompletedProcess[str]:
    always = {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    return subprocess.run(
        [sys.executable if cold else interpreter(), *map(str, arguments)],
        cwd=cwd,
        env={**os.environ, **always, **(environment or {})},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
