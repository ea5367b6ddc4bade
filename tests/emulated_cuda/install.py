"""Makes a process use the emulated GPU."""

import os
from collections.abc import Callable
from typing import Any

from tests.emulated_cuda.counts import SyncPlaces
from tests.emulated_cuda.device import FOLDER_VARIABLE

__all__ = ["install", "is_emulated"]


def is_emulated() -> bool:
    """Returns whether GPUs are emulated here: ``.venv-cuda/bin/emulated`` has started us."""
    return FOLDER_VARIABLE in os.environ


def install() -> None:
    """Has CPU functions compute what kernels would; once, before a process group is made."""
    # They have oracles: of our own kernels, and of FBGEMM's.
    import tests.emulated_cuda.fusedrec
    import tests.emulated_cuda.fusedrec_rows
    import tests.emulated_cuda.variable_batches  # noqa: F401
    from tests.emulated_cuda.collectives import replace_nccl
    from tests.emulated_cuda.dispatch import EmulatedDispatch
    from tests.emulated_cuda.launches import note_launches

    note_launches()
    replace_nccl()
    _watch_waits()
    EmulatedDispatch().__enter__()


def _watch_waits() -> None:
    """Has explicit waits noticed, too, which are no operators."""
    import torch

    for owner, what in ((torch.cuda.Stream, "Stream"), (torch.cuda.Event, "Event")):
        owner.synchronize = _watched(owner.synchronize, what)  # type: ignore[method-assign]
    torch.cuda.synchronize = _watched(torch.cuda.synchronize, "cuda")


def _watched(wait: Callable[..., None], what: str) -> Callable[..., None]:
    def watched(*args: Any) -> None:
        with SyncPlaces.watch(f"{what}.synchronize"):
            wait(*args)

    return watched
