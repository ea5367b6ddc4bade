"""Where TorchRec keeps the lookups of sharded modules."""

from collections.abc import Iterator

from torch import nn
from torchrec.distributed.embedding_types import ShardedEmbeddingModule

__all__ = ["lookups_of"]


def lookups_of(model: nn.Module) -> list[nn.Module]:
    """Returns the lookups of all sharded modules, each once, in the same order on all ranks.

    TorchRec keeps some of them in plain lists, which ``modules()`` does not see, and some wrapped
    in DistributedDataParallel.

    Raises:
        AssertionError: a module with sharded tables does not have its lookups where they should be.
    """
    return list(dict.fromkeys(_unwrapped_lookups(model)))


def _unwrapped_lookups(model: nn.Module) -> Iterator[nn.Module]:
    for module in model.modules():
        if not isinstance(module, ShardedEmbeddingModule):
            continue  # only modules with sharded tables have lookups
        lookups = getattr(module, "_lookups", None)
        if lookups is None:
            raise AssertionError(f"{type(module).__qualname__} has no _lookups in this TorchRec")
        for lookup in lookups:
            yield getattr(lookup, "module", lookup)
