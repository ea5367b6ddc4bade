"""The model inside of TorchRec's DistributedModelParallel, as it is wrapped at the moment."""

from torch import nn
from torchrec.distributed.model_parallel import DistributedModelParallel

__all__ = ["wrapped_module"]


def wrapped_module(dmp: DistributedModelParallel) -> nn.Module:
    """Returns the sharded model, in DistributedDataParallel if it is wrapped already."""
    return dmp._dmp_wrapped_module
