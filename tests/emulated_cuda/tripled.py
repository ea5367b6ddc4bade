"""A kernel with arguments of all kinds; imported where there is Triton only."""

import importlib
from typing import Any

from fusedrec_torchrec.core.gpu.kernel import Kernel

tl: Any = importlib.import_module("triton.language")


def _triple(x, y, weights, n, m, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    i = tl.arange(0, BLOCK)
    value = 3 * tl.load(x + i, mask=i < n) + m
    if weights is not None:
        value += tl.load(weights + i, mask=i < n)
    tl.store(y + i, value.to(y.dtype.element_ty), mask=i < n)


def tripling() -> Kernel:
    """Returns the kernel as in a new process; it triples numbers, and adds others."""
    return Kernel(_triple, numbers=["n"], addresses=["weights"])
