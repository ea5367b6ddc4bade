"""Leaves ``torch.inference_mode`` for the stages of a sharded module.

FBGEMM's lookups have no CPU kernels in it, and tensors that are made in it and kept, as offsets
are, could not be used in training later on.  ``no_grad`` does the same for a lookup.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import ParamSpec, TypeVar

import torch
from torchrec.distributed.types import LazyAwaitable

__all__ = ["outside_inference_mode"]

P = ParamSpec("P")
R = TypeVar("R")


@contextmanager
def _outside() -> Iterator[None]:
    with torch.inference_mode(False), torch.no_grad():
        yield


def outside_inference_mode(function: Callable[P, R]) -> Callable[P, R]:
    """Decorates a function that is to run with ``no_grad`` where ``inference_mode`` is on."""

    @wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        if not torch.is_inference_mode_enabled():
            return function(*args, **kwargs)
        with _outside():
            result = function(*args, **kwargs)
        if isinstance(result, LazyAwaitable):  # TorchRec's last operators run when it is waited for
            result._wait_impl = outside_inference_mode(result._wait_impl)
        return result

    return run
