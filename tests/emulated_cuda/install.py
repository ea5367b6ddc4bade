"""Makes a process use the emulated GPU."""

import os

from tests.emulated_cuda.device import FOLDER_VARIABLE

__all__ = ["install", "is_emulated"]


def is_emulated() -> bool:
    """Returns whether GPUs are emulated here: ``.venv-cuda/bin/emulated`` has started us."""
    return FOLDER_VARIABLE in os.environ


def install() -> None:
    """Has CPU functions compute what kernels would; once, before a process group is made."""
    import tests.emulated_cuda.fusedrec  # noqa: F401 - oracles of our own kernels
    from tests.emulated_cuda.collectives import replace_nccl
    from tests.emulated_cuda.dispatch import EmulatedDispatch

    replace_nccl()
    EmulatedDispatch().__enter__()
