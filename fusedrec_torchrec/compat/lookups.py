"""Where TorchRec keeps the lookups of sharded modules."""

from torch import nn

__all__ = ["lookups_of"]


def lookups_of(model: nn.Module) -> list[nn.Module]:
    """Returns the lookups of all sharded modules, each once, in the same order on all ranks.

    TorchRec keeps some of them in plain lists, which ``modules()`` does not see, and some wrapped
    in DistributedDataParallel.
    """
    found = (
        getattr(lookup, "module", lookup)
        for module in model.modules()
        for lookup in getattr(module, "_lookups", None) or []
    )
    return list(dict.fromkeys(found))
