"""Processes that do not outlive those they work for."""

import os
import signal
import subprocess
import sys
from pathlib import Path

from tests.cli.command import ROOT

WORKER = """
import os, sys, time
from fusedrec_torchrec.core.processes import die_with
die_with(int(sys.argv[1]))
print(os.getpid(), flush=True)
time.sleep(600)
"""
BOSS = """
import os, subprocess, sys, time
subprocess.Popen([sys.executable, sys.argv[1], str(os.getpid())])
time.sleep(600)
"""


def test_a_worker_ends_with_a_boss_that_is_killed(tmp_path: Path) -> None:
    (tmp_path / "worker.py").write_text(WORKER)
    (tmp_path / "boss.py").write_text(BOSS)
    boss = subprocess.Popen(
        [sys.executable, str(tmp_path / "boss.py"), str(tmp_path / "worker.py")],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert boss.stdout is not None
    assert int(boss.stdout.readline()) > 0  # the worker is there
    boss.send_signal(signal.SIGKILL)
    assert boss.stdout.read() == ""  # ends when the last one that could write is gone
    boss.wait()
