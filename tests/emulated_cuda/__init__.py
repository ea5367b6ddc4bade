"""CUDA without a GPU: the real host code of torch and FBGEMM runs, kernels are written down.

README.md says what that shows, and what it cannot.
"""

from tests.emulated_cuda.counts import Counts, counted
from tests.emulated_cuda.install import install, is_emulated
from tests.emulated_cuda.oracles import LEAVE, oracle

__all__ = ["LEAVE", "Counts", "counted", "install", "is_emulated", "oracle"]
