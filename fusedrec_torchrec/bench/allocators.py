"""Says how the ranks of a benchmark get and keep their memory.

Tensors of tens of megabytes come fresh from the operating system with glibc's defaults, page by
page, in every step.  Who trains in earnest uses an allocator that keeps memory.  Both are measured,
since they shorten the steps of different systems by different amounts.

glibc and the dynamic linker read their settings when a process starts, so that these are part of
the environment in which ranks are started.
"""

import ctypes.util
from collections.abc import Mapping
from typing import Literal, get_args

__all__ = ["ALLOCATORS", "Allocator", "allocator_environment", "missing_allocator"]

Allocator = Literal["default", "keep", "jemalloc"]
ALLOCATORS: tuple[Allocator, ...] = get_args(Allocator)

KEEP = {
    "MALLOC_MMAP_THRESHOLD_": str(1 << 30),
    "MALLOC_TRIM_THRESHOLD_": str(8 << 30),
    "MALLOC_TOP_PAD_": str(256 << 20),
}
JEMALLOC = "libjemalloc.so.2"
OF_GLIBC = ("MALLOC_", "GLIBC_TUNABLES")


def allocator_environment(allocator: Allocator, environment: Mapping[str, str]) -> dict[str, str]:
    """Returns the environment of a process with an allocator.

    Args:
        allocator: ``default`` is glibc with its defaults, ``keep`` is glibc told to keep memory.
        environment: all other variables; what it says about glibc's allocator is left out.
    """
    result = {name: value for name, value in environment.items() if not name.startswith(OF_GLIBC)}
    if allocator == "keep":
        result.update(KEEP)
    if allocator == "jemalloc":
        others = result.get("LD_PRELOAD", "").split()
        result["LD_PRELOAD"] = " ".join([JEMALLOC, *others])
    return result


def missing_allocator(allocator: Allocator) -> str | None:
    """Returns why an allocator cannot be had here; None if it can."""
    if allocator != "jemalloc" or ctypes.util.find_library("jemalloc") == JEMALLOC:
        return None
    return f"needs {JEMALLOC}, which the dynamic linker does not find"
