"""Writes down what our kernels are launched with on the emulated GPU.

    EMULATED_LAUNCHES=$PWD/runs/launches.txt make test-cuda
    sort -u runs/launches.txt > tests/core/gpu/launches.txt

A line is one variant of a kernel that Triton is asked to compile: its module and name, its warps,
and for each argument its type, with ``:16`` if it is a multiple of 16, or its value, if the kernel
is compiled for it.  ``tests/core/gpu/compiled.py`` compiles all of them.
"""

import os
from pathlib import Path
from typing import Any

from tests.core.gpu.launch import Launch

__all__ = ["note_launches"]

FILE_VARIABLE = "EMULATED_LAUNCHES"


def note_launches() -> None:
    """Has launches of this process written to the file that the environment names, if it does."""
    path = os.environ.get(FILE_VARIABLE)
    if path is None:
        return
    from triton import knobs

    def note(*, fn: Any, compile: dict[str, Any], **_: Any) -> None:
        if not fn.module.startswith(Launch.PACKAGE):
            return
        (attributes,) = compile["configs"]
        aligned = {i for (i,), given in attributes.items() if ["tt.divisibility", 16] in given}
        values = {i: value for (i,), value in compile["constants"].items()}
        arguments = {
            name: repr(values[i]) if i in values else kind + (":16" if i in aligned else "")
            for i, (name, kind) in enumerate(compile["signature"].items())
        }
        name = f"{fn.module.removeprefix(Launch.PACKAGE)}.{fn.name}"
        launch = Launch(name, compile["num_warps"], tuple(arguments.items()))
        with Path(path).open("a") as file:  # lines of several ranks do not mix
            file.write(f"{launch}\n")

    knobs.runtime.jit_cache_hook = note
