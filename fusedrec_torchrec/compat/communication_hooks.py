"""The communication hooks that DistributedDataParallel was given."""

from torch.nn.parallel import DistributedDataParallel

__all__ = ["hook_states"]


def hook_states(ddp: DistributedDataParallel) -> list[object]:
    """Returns the state of each communication hook, as it was registered."""
    return [state for _, state in ddp._comm_hooks]
