"""The feature processors of TorchRec's FeatureProcessedEmbeddingBagCollection."""

from collections.abc import Mapping

from torch import nn
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.modules.feature_processor_ import FeatureProcessorsCollection
from torchrec.modules.fp_embedding_modules import FeatureProcessedEmbeddingBagCollection

__all__ = ["embedding_bags_of", "position_limits"]


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


def embedding_bags_of(module: FeatureProcessedEmbeddingBagCollection) -> EmbeddingBagCollection:
    """Returns the collection of tables inside of a feature-processed one."""
    return module._embedding_bag_collection
