"""A wheel that was built with a compiler has the operators in it; any other builds as well."""

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tests.cli.command import ROOT
from tests.core.native.compiler import needs_operators, quick_compiler

LIBRARY = "fusedrec_torchrec/core/native/built/fusedrec_ops.so"
ASK = "from fusedrec_torchrec.core import native; print(native.operators())"


def build_wheel(folder: Path, **environment: str) -> tuple[Path, str]:
    """The wheel of a copy of the sources, and what pip said."""
    source = folder / "source"
    if not source.exists():
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / "fusedrec_torchrec", source / "fusedrec_torchrec", ignore=ignored)
        for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
            shutil.copy(ROOT / name, source / name)
    wheels = folder / "wheels"
    shutil.rmtree(wheels, ignore_errors=True)
    options = ("--no-deps", "--no-build-isolation", "--no-index", "--verbose")
    done = run(
        "-m", "pip", "wheel", source, *options, "--wheel-dir", wheels, environment=environment
    )
    (wheel,) = wheels.iterdir()
    return wheel, done


def run(
    *arguments: object, cwd: Path | None = None, environment: dict[str, str] | None = None
) -> str:
    done = subprocess.run(
        [sys.executable, *map(str, arguments)],
        cwd=cwd,
        env={**os.environ, **(environment or {})},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    return done.stdout


def contents(wheel: Path) -> list[str]:
    with zipfile.ZipFile(wheel) as archive:
        return archive.namelist()


def check_that_it_loads(wheel: Path, folder: Path) -> None:
    """The operators come out of the wheel, with no compiler at hand and nothing cached."""
    target = folder / "target"
    run("-m", "pip", "install", "--no-deps", "--no-index", "--target", target, wheel)
    cache = folder / "empty"
    alone = {"PATH": "/nowhere", "TORCH_EXTENSIONS_DIR": str(cache), "PYTHONPATH": str(target)}
    said = run("-c", ASK, cwd=folder, environment=alone)
    assert said.strip() == f"built in ({target / LIBRARY})"
    assert not cache.exists()


@needs_operators
def test_the_operators_of_a_wheel_are_used_and_a_pure_wheel_forgets_them(tmp_path: Path) -> None:
    wheel, _ = build_wheel(tmp_path, **quick_compiler(tmp_path))
    assert "-py3-none-linux_" in wheel.name
    assert LIBRARY in contents(wheel)
    check_that_it_loads(wheel, tmp_path)

    pure, _ = build_wheel(tmp_path, FUSEDREC_BUILD_NATIVE="0")  # over the first one's files
    assert pure.name.endswith("-py3-none-any.whl")
    assert not [name for name in contents(pure) if "built" in name]
    assert {name for name in contents(pure) if name.endswith(".h")}  # for the build at run time


def test_without_a_compiler_the_wheel_is_pure(tmp_path: Path) -> None:
    wheel, said = build_wheel(tmp_path, CXX="no_compiler")
    assert wheel.name.endswith("-py3-none-any.whl")
    assert "not built into the wheel: CXX is 'no_compiler', which is no program" in said


def test_operators_that_must_be_there_and_cannot_are_an_error(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="cannot be built into the wheel"):
        build_wheel(tmp_path, CXX="no_compiler", FUSEDREC_BUILD_NATIVE="1")


@needs_operators
@pytest.mark.slow
def test_a_wheel_of_the_compiler_loads(tmp_path: Path) -> None:
    wheel, _ = build_wheel(tmp_path, FUSEDREC_BUILD_NATIVE="1")
    check_that_it_loads(wheel, tmp_path)
