"""The C++ operators: built once, shared by processes, and never in the way."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from fusedrec_torchrec.exchange import native

ASK = "from fusedrec_torchrec.exchange import native; print(native.available())"


def ask(**environment: str) -> tuple[str, str]:
    done = subprocess.run(
        [sys.executable, "-c", ASK],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=True,
        timeout=200,
    )
    return done.stdout.strip(), done.stderr


def test_can_be_switched_off() -> None:
    out, err = ask(FUSEDREC_NATIVE="0")
    assert out == "False"
    assert "could not be built" not in err


def test_without_a_compiler_torch_takes_over(tmp_path: Path) -> None:
    out, err = ask(
        TORCH_EXTENSIONS_DIR=str(tmp_path), CXX=str(tmp_path / "no_such_compiler"), PATH="/nowhere"
    )
    assert out == "False"
    assert "the C++ operators could not be built" in err
    assert "FUSEDREC_NATIVE=0 silences this" in err


def test_an_unwritable_folder_is_no_error(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("not a folder")
    out, err = ask(TORCH_EXTENSIONS_DIR=str(blocked))
    assert out == "False"
    assert "the C++ operators could not be built" in err


@pytest.mark.skipif(not native.available(), reason="needs a C++ compiler")
@pytest.mark.slow
def test_the_lock_of_a_killed_build_is_no_obstacle(tmp_path: Path) -> None:
    """Otherwise torch waits for the dead process for good."""
    environment = {"TORCH_EXTENSIONS_DIR": str(tmp_path)}
    assert ask(**environment)[0] == "True"
    (folder,) = tmp_path.iterdir()
    (folder / "lock").touch()
    assert ask(**environment)[0] == "True"
    assert not (folder / "lock").exists()
