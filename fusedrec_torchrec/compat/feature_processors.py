"""The feature processors of TorchRec's FeatureProcessedEmbeddingBagCollection."""

from collections.abc import Mapping

import torch
from torch import nn
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.modules.feature_processor_ import (
    FeatureProcessorsCollection,
    PositionWeightedModule,
    PositionWeightedModuleCollection,
)
from torchrec.modules.fp_embedding_modules import FeatureProcessedEmbeddingBagCollection

__all__ = ["embedding_bags_of", "position_limits", "position_weights"]


def position_limits(module: FeatureProcessedEmbeddingBagCollection) -> dict[str, int]:
    """Returns how many positions each feature's processor has weights for, where it has any."""
    processors: Mapping[str, nn.Module] | FeatureProcessorsCollection = module._feature_processors
    if isinstance(processors, FeatureProcessorsCollection):
        return dict(getattr(processors, "max_feature_lengths", {}))
    return {
        feature: processor.position_weight.numel()  # type: ignore[operator]
        for feature, processor in processors.items()
        if hasattr(processor, "position_weight")
    }


def position_weights(processors: nn.Module) -> dict[str, torch.Tensor] | None:
    """Returns the weights of positions by feature; None if processors do anything else."""
    if type(processors) is PositionWeightedModuleCollection:
        given: dict[str, torch.Tensor] = processors.position_weights_dict  # type: ignore[assignment]
        return dict(given)
    if not isinstance(processors, nn.ModuleDict):
        return None
    weights: dict[str, torch.Tensor] = {}
    for feature, processor in processors.items():
        if type(processor) is not PositionWeightedModule:
            return None
        weights[feature] = processor.position_weight  # type: ignore[assignment]
    return weights


def embedding_bags_of(module: FeatureProcessedEmbeddingBagCollection) -> EmbeddingBagCollection:
    """Returns the collection of tables inside of a feature-processed one."""
    return module._embedding_bag_collection
