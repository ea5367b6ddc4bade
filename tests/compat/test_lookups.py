"""The lookups of sharded modules: found by type, and missed if TorchRec keeps them elsewhere."""

import pytest
from torch import nn
from torchrec.distributed.embeddingbag import ShardedEmbeddingBagCollection

from fusedrec_torchrec.compat.lookups import lookups_of


class WithLookups(nn.Module):
    """Not a module of TorchRec, and its list means something else."""

    _lookups = ("not", "modules")


def sharded() -> ShardedEmbeddingBagCollection:
    module = ShardedEmbeddingBagCollection.__new__(ShardedEmbeddingBagCollection)
    nn.Module.__init__(module)
    return module


def test_each_lookup_is_there_once_and_without_its_wrapper() -> None:
    first, second = nn.Linear(1, 1), nn.Linear(2, 2)
    wrapper = nn.Module()
    wrapper.module = second
    modules = sharded(), sharded()
    modules[0]._lookups = [first, wrapper]
    modules[1]._lookups = [second]
    assert lookups_of(nn.ModuleList([*modules, WithLookups(), nn.Linear(1, 1)])) == [first, second]


def test_a_sharded_module_without_lookups_is_named() -> None:
    with pytest.raises(AssertionError, match="ShardedEmbeddingBagCollection has no _lookups"):
        lookups_of(nn.Sequential(sharded()))
