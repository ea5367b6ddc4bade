"""What is launched compiles for A100 and H100, and needs no more registers than there are."""

import importlib
import inspect
import json
import os
import pkgutil
import subprocess
import sys
from importlib.util import find_spec
from types import ModuleType

import pytest

from tests.core.gpu.compiled import ARCHITECTURES, Compiled
from tests.core.gpu.launch import Launch, recorded_launches

# A rank has one program of these, and what counts is how many warps it has.
ONE_PROGRAM = ("entries._arrange", "entries._find")

needs_triton = pytest.mark.skipif(find_spec("triton") is None, reason="needs Triton")


def compile_in_a_process_of_its_own(*options: str) -> list[Compiled]:
    """Kernels of this process are for the interpreter."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "tests.core.gpu.compiled", "--json", *options]
    told = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    return [Compiled(**values) for values in json.loads(told.stdout.splitlines()[-1])]


def check(results: list[Compiled], launches: int) -> None:
    assert len(results) >= len(ARCHITECTURES) * launches
    for one in results:
        assert one.stack == 0, one  # nothing is spilled
        assert one.occupancy >= 0.3 or one.kernel in ONE_PROGRAM, one


@needs_triton
def test_what_is_launched_needs_no_stack() -> None:
    results = compile_in_a_process_of_its_own("--fewer")
    check(results, len({launch.kernel for launch in recorded_launches()}))


@needs_triton
@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_what_is_launched_needs_no_stack_whatever_is_aligned() -> None:
    launches = recorded_launches()
    check(compile_in_a_process_of_its_own(), len(launches))


def test_a_launch_is_what_was_written_down() -> None:
    for launch in recorded_launches():
        assert Launch.of(str(launch)) == launch


@needs_triton
def test_all_kernels_have_been_launched() -> None:
    """Else nobody knows what to compile them for."""
    known = set()
    for module in kernel_modules():
        source = inspect.getsource(module)
        for name, function in vars(module).items():
            is_own = getattr(getattr(function, "fn", None), "__module__", None) == module.__name__
            if is_own and hasattr(function, "arg_names") and f" {name}[" in source:
                known.add(f"{module.__name__.removeprefix(Launch.PACKAGE)}.{name}")
    assert len(known) > 30
    assert known == {launch.kernel for launch in recorded_launches()}


def kernel_modules() -> list[ModuleType]:
    """Returns the modules that the package tells Triton to compile from."""
    from fusedrec_torchrec.core import gpu

    return [
        importlib.import_module(f"{gpu.__name__}.{found.name}")
        for found in pkgutil.iter_modules(gpu.__path__)
    ]
