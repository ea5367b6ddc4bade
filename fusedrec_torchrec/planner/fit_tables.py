"""Which tables of a model can be fused, and which of them their owners can pool."""

from torch import nn
from torchrec.distributed.types import ModuleSharder
from torchrec.modules.embedding_configs import BaseEmbeddingConfig, DataType
from torchrec.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection
from torchrec.modules.fp_embedding_modules import FeatureProcessedEmbeddingBagCollection

from fusedrec_torchrec.compat.feature_processors import embedding_bags_of
from fusedrec_torchrec.compat.optimizers import optimizer_of, optimizers_of
from fusedrec_torchrec.sharding.sharders import FusedEmbeddingBagCollectionSharder

__all__ = ["can_be_owned", "configs_of", "is_weighted", "unfit_tables", "unowned_tables"]


def unfit_tables(
    module: nn.Module, sharders: list[ModuleSharder[nn.Module]], device: str
) -> set[str]:
    """Returns the tables that cannot be fused, because of dimension, data type or optimizer."""
    by_type = {sharder.module_type: sharder for sharder in sharders}
    unfit = set()
    for child in module.modules():
        sharder = by_type.get(type(child))
        if sharder is None:
            continue
        data_types = {config.name: config.data_type for config in configs_of(child)}
        default = (getattr(sharder, "fused_params", None) or {}).get("optimizer")
        for name, weight in sharder.shardable_parameters(child).items():
            optimizer = optimizer_of(weight, default)
            if (
                weight.shape[1] % 4
                or data_types.get(name) not in (DataType.FP32, DataType.FP16)
                or optimizer not in optimizers_of(device)
            ):
                unfit.add(name)
    return unfit


def configs_of(module: nn.Module) -> list[BaseEmbeddingConfig]:
    """Returns the configurations of the tables of a module; none if we do not know it."""
    if isinstance(module, FeatureProcessedEmbeddingBagCollection):
        module = embedding_bags_of(module)
    if isinstance(module, EmbeddingBagCollection):
        return module.embedding_bag_configs()
    return module.embedding_configs() if isinstance(module, EmbeddingCollection) else []


def is_weighted(module: nn.Module) -> bool:
    """Returns whether the ids of a module's bags have weights."""
    return isinstance(module, EmbeddingBagCollection) and module.is_weighted()


def can_be_owned(module: nn.Module, sharder: ModuleSharder[nn.Module], table: str) -> bool:
    """Returns whether owners may pool a table of a module, if it is fused.

    They pool bags, not sequences; weights of feature processors are only known to the requester;
    and rows that are hot are on all ranks.
    """
    if not isinstance(module, EmbeddingBagCollection):
        return False
    return not (
        isinstance(sharder, FusedEmbeddingBagCollectionSharder) and sharder.may_be_hot(table)
    )


def unowned_tables(module: nn.Module, sharders: list[ModuleSharder[nn.Module]]) -> set[str]:
    """Returns the tables of a model that owners cannot pool."""
    by_type = {sharder.module_type: sharder for sharder in sharders}
    return {
        name
        for child in module.modules()
        if (sharder := by_type.get(type(child))) is not None
        for name in sharder.shardable_parameters(child)
        if not can_be_owned(child, sharder, name)
    }
