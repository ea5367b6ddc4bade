"""Programs of the warm interpreter behave as those of ``python`` do."""

import signal
import subprocess
from pathlib import Path

import pytest

from tests.cli.command import ROOT, python
from tests.warm import interpreter

REPORT = """
import os, sys
print(__name__, sys.argv[1:], os.getcwd(), os.environ["WORD"], sys.stdin.read())
print("trouble", file=sys.stderr)
"""
WAIT = "import signal; print('waiting'); signal.pause()"


@pytest.mark.parametrize("cold", [True, False])
def test_arguments_folder_environment_and_streams(tmp_path: Path, cold: bool) -> None:
    (tmp_path / "report.py").write_text(REPORT)
    for program in (["-c", REPORT], ["-m", "report"], [tmp_path / "report.py"]):
        done = python(*program, "a b", "ü", cwd=tmp_path, cold=cold, environment={"WORD": "x\ny"})
        assert done.stdout == f"__main__ ['a b', 'ü'] {tmp_path} x\ny \n"
        assert (done.returncode, done.stderr) == (0, "trouble\n")


@pytest.mark.parametrize(
    ("code", "ends_with", "says"),
    [
        ("import sys; sys.exit(7)", 7, ""),
        ("import sys; sys.exit('too bad')", 1, "too bad\n"),
        ("1 / 0", 1, "ZeroDivisionError: division by zero\n"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", -9, ""),
        ("import atexit, sys; atexit.register(print, 'bye', file=sys.stderr)", 0, "bye\n"),
    ],
)
def test_how_it_ends(code: str, ends_with: int, says: str) -> None:
    for cold in (True, False):
        done = python("-c", code, cold=cold)
        assert done.returncode == ends_with and done.stderr.endswith(says)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_signals_reach_it(number: int) -> None:
    process = subprocess.Popen(
        [interpreter(), "-c", WAIT], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "waiting\n"
    process.send_signal(number)
    output, errors = process.communicate()  # ends when the program, too, is gone
    assert process.returncode == -number and output == ""
    assert errors.endswith("KeyboardInterrupt\n") == (number == signal.SIGINT)


def test_what_it_starts_is_warm_as_well() -> None:
    inner = "import sys; print('torch' in sys.modules, sys.executable)"
    outer = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {inner!r}], check=True)"
    assert python("-c", outer, cwd=ROOT).stdout == f"True {interpreter()}\n"
