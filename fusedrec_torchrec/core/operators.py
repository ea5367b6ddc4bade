"""Where ``torch.ops.fusedrec`` can be used: C++ operators on CPU, Triton kernels on CUDA."""

import torch

from fusedrec_torchrec.core import gpu, native

__all__ = ["available_on"]


def available_on(device: torch.device, *names: str) -> bool:
    """Tells whether operators can be used for tensors on a device, now.

    Args:
        device: of the tensors.
        *names: of the operators, of which CUDA does not have all.
    """
    if device.type == "cuda":
        return all(name in gpu.SCHEMAS for name in names) and gpu.available()
    return native.available_on(device)
