"""Builds the C++ operators into the wheel where that can be done; all else is in pyproject.toml.

It takes a compiler and the torch that the operators are to run with, so ``--no-build-isolation``.
Without them the wheel is one of Python files only, and the operators are built when they are first
wanted.  ``FUSEDREC_BUILD_NATIVE=0`` leaves them out, ``FUSEDREC_BUILD_NATIVE=1`` makes it an error
if they cannot be built.
"""

import importlib.util
import os
import shutil
from pathlib import Path
from types import ModuleType

from setuptools import Distribution, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py

NATIVE = Path("fusedrec_torchrec/core/native")
SETTING = "FUSEDREC_BUILD_NATIVE"


def library_module() -> ModuleType:
    """``library.py`` by its path: the package itself needs more than torch to be imported."""
    spec = importlib.util.spec_from_file_location("native_library", NATIVE / "library.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def build_operators(folder: Path) -> bool:
    """Builds the operators into a folder; returns whether they are there."""
    shutil.rmtree(folder, ignore_errors=True)  # of an earlier build in the same place
    setting = os.environ.get(SETTING, "")
    if setting not in ("", "0", "1"):
        raise ValueError(f"{SETTING} is {setting!r}, must be 0, 1 or empty")
    if setting == "0":
        return False
    reason = "torch is not installed in the environment of the build"
    if importlib.util.find_spec("torch") is not None:
        library = library_module()
        folder.mkdir(parents=True)
        try:
            library.Library(folder).build()
            return True
        except library.BuildError as error:
            shutil.rmtree(folder)
            reason = str(error)
    if setting == "1":
        raise SystemExit(f"the C++ operators cannot be built into the wheel: {reason}")
    print(f"the C++ operators are not built into the wheel: {reason}")
    return False


class WithOperators(Distribution):
    """A distribution that is for one platform once the operators have been built into it."""

    has_operators = False

    def has_ext_modules(self) -> bool:
        return self.has_operators


class BuildPython(build_py):
    def run(self) -> None:
        super().run()
        if not self.editable_mode:  # there the operators are built when they are first wanted
            folder = Path(self.build_lib) / NATIVE / "built"
            self.distribution.has_operators = build_operators(folder)


class BuildWheel(bdist_wheel):
    def run(self) -> None:
        self.run_command("build")
        self.root_is_pure = not self.distribution.has_ext_modules()
        super().run()

    def get_tag(self) -> tuple[str, str, str]:
        python, abi, platform = super().get_tag()
        # The operators are a library of torch's, not a module of one version of Python.
        return (python, abi, platform) if self.root_is_pure else ("py3", "none", platform)


setup(distclass=WithOperators, cmdclass={"build_py": BuildPython, "bdist_wheel": BuildWheel})
