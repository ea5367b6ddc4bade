"""Runs a program on the emulated GPU: ``python -m tests.emulated_cuda.program -m module ...``.

For programs that start ranks by ``sys.executable``: ``executable`` makes a stand-in for it.
"""

import runpy
import sys
from pathlib import Path

from tests.emulated_cuda.install import install

__all__ = ["executable"]


def executable(folder: Path) -> str:
    """Writes a stand-in for ``python`` whose programs use the emulated GPU; returns its path."""
    path = folder / "python"
    path.write_text(f'#!/bin/sh\nexec {sys.executable} -m tests.emulated_cuda.program "$@"\n')
    path.chmod(0o755)
    return str(path)


if __name__ == "__main__":
    option, module, *arguments = sys.argv[1:]
    assert option == "-m", sys.argv
    install()
    sys.argv = [module, *arguments]
    runpy.run_module(module, run_name="__main__", alter_sys=True)
