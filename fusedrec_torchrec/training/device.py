"""Where ranks compute."""

import torch

from fusedrec_torchrec.training.config import LaunchConfig

__all__ = ["check_device", "device_type"]


def device_type(config: LaunchConfig) -> str:
    """Returns ``"cuda"`` or ``"cpu"``, as the configuration says or as there is."""
    if config.device != "auto":
        return config.device
    return "cuda" if torch.cuda.is_available() else "cpu"


def check_device(config: LaunchConfig) -> None:
    """Refuses what this machine does not have.

    Raises:
        ValueError: there is no CUDA device, and the configuration needs one.
    """
    if config.device == "cuda" and not torch.cuda.is_available():
        raise ValueError("launch.device is cuda, but torch finds no CUDA device")
    if config.backend == "nccl" and device_type(config) == "cpu":
        raise ValueError("launch.backend is nccl, which needs CUDA; use gloo or auto on CPU")
