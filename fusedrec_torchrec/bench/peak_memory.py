"""Asks how much memory this process takes, and took at most."""

import ctypes
import gc
from pathlib import Path

__all__ = ["forget_peak", "memory"]


def memory(name: str) -> int:
    """Returns the bytes of this process's memory: now (VmRSS) or at most (VmHWM)."""
    status = Path("/proc/self/status").read_text()
    return next(
        int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith(name)
    )


def forget_peak() -> None:
    """Lets the peak count from here, without what is free by now.

    An allocator that keeps memory is made to return it once, or what was freed before would still
    be part of all later peaks.
    """
    gc.collect()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
    Path("/proc/self/clear_refs").write_text("5")
