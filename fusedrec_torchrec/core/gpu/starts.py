"""Where the words for each rank begin, on CUDA.

These numbers follow from the capacity of messages, which rarely changes.  So they are copied to the
device once, and not for every batch.
"""

from collections.abc import Sequence

import torch

from fusedrec_torchrec.core.kept import Kept
from fusedrec_torchrec.core.transfer import to_device

__all__ = ["starts_on_device"]

_KNOWN = Kept[torch.Tensor](lambda starts_W: [starts_W])


def starts_on_device(starts_W: Sequence[int], device: torch.device) -> torch.Tensor:
    """Returns the numbers on the device, int64, for the current stream; nobody may change them."""
    key = (device, *starts_W)
    return _KNOWN.get(key, lambda: to_device(starts_W, device))
