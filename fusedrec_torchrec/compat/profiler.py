"""Whether torch's profiler is on."""

import torch

__all__ = ["profiler_is_on"]


def profiler_is_on() -> bool:
    """Returns whether somebody records a profile: marks cost more than a small stage itself."""
    return torch._C._autograd._profiler_enabled()
