"""The operators come from the cache or the compiler, are shared, and are never in the way."""

import fcntl
import hashlib
import json
import os
import sys
from pathlib import Path

import pytest

from tests.cli.command import python
from tests.core.native.compiler import cached, needs_operators, paused, quick_compiler
from tests.core.native.fresh import load, start_loading

ASK = "from fusedrec_torchrec.core import native; print(native.available())"


def test_can_be_switched_off() -> None:
    found = load(FUSEDREC_NATIVE="0")
    assert found.origin == "none"
    assert found.explanation == "FUSEDREC_NATIVE=0"
    assert not found.log


def test_without_a_compiler_torch_takes_over(tmp_path: Path) -> None:
    environment = {"TORCH_EXTENSIONS_DIR": str(tmp_path), "CXX": "", "PATH": "/nowhere"}
    done = python("-c", ASK, environment=environment)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "False"
    assert done.stderr.count("the C++ operators could not be built (there is no C++ compiler") == 1
    assert "FUSEDREC_NATIVE=0 silences this" in done.stderr


def test_an_unwritable_folder_is_no_error(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("not a folder")
    found = load(TORCH_EXTENSIONS_DIR=str(blocked))
    assert found.origin == "none"
    assert f"{blocked}/" in found.explanation
    assert "cannot be written: Not a directory; TORCH_EXTENSIONS_DIR may name" in found.log


@needs_operators
def test_the_cache_takes_neither_a_compiler_nor_any_other_program(tmp_path: Path) -> None:
    cached(tmp_path)
    found = load(TORCH_EXTENSIONS_DIR=str(tmp_path / "cache"), CXX="no_compiler", PATH="/nowhere")
    assert found.origin == "cached"
    assert not found.log


@needs_operators
@pytest.mark.parametrize("size", [0, 20_000, 100_000])
def test_a_truncated_library_is_built_anew(tmp_path: Path, size: int) -> None:
    """The dynamic loader would kill the process with a bus error."""
    environment = quick_compiler(tmp_path)
    library = cached(tmp_path)
    os.truncate(library.path, size)
    found = load(**environment)
    assert found.origin == "built now"
    assert f"built anew: {library.path} has {size} bytes instead of" in found.log
    assert load(**environment).origin == "cached"


@needs_operators
def test_a_library_that_does_not_load_is_built_anew(tmp_path: Path) -> None:
    """Such as one that was built on a machine with newer libraries."""
    environment = quick_compiler(tmp_path)
    library = cached(tmp_path)
    garbage = b"garbage" * 1000
    library.path.write_bytes(garbage)
    manifest = json.loads(library.manifest.read_text())
    manifest |= {"size": len(garbage), "sha256": hashlib.sha256(garbage).hexdigest()}
    library.manifest.write_text(json.dumps(manifest))
    found = load(**environment)
    assert found.origin == "built now"
    assert "built anew" in found.log
    assert "does not load" in found.log


@needs_operators
def test_a_damaged_library_without_a_compiler_is_left_alone(tmp_path: Path) -> None:
    library = cached(tmp_path)
    os.truncate(library.path, 20_000)
    found = load(TORCH_EXTENSIONS_DIR=str(tmp_path / "cache"), CXX="no_compiler")
    assert found.origin == "none"
    assert "CXX is 'no_compiler', which is no program" in found.log


@needs_operators
def test_of_several_processes_one_builds(tmp_path: Path) -> None:
    with paused(tmp_path) as (first, environment):
        (lock,) = tmp_path.glob("cache/*/fusedrec.lock")
        with lock.open() as file, pytest.raises(BlockingIOError):
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        others = [start_loading(**environment) for _ in range(3)]
    assert first.answer().origin == "built now"
    assert [each.answer().origin for each in others] == ["cached"] * 3
    assert (tmp_path / "calls").read_text() == "call\n"


@needs_operators
def test_a_killed_build_is_no_obstacle(tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    with paused(tmp_path) as (building, environment):
        building.process.kill()
        building.process.join()
        found = load(**environment | {"CXX": quick_compiler(other)["CXX"]})
    assert found.origin == "built now"


@needs_operators
@pytest.mark.slow
def test_the_compiler_builds_what_is_loaded(tmp_path: Path) -> None:
    environment = {"TORCH_EXTENSIONS_DIR": str(tmp_path)}
    assert load(**environment).origin == "built now"
    assert load(**environment).origin == "cached"
    (library,) = tmp_path.glob("*/fusedrec_ops.so")
    assert os.fsencode(Path(sys.prefix)) not in library.read_bytes()
