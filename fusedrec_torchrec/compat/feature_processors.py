"""The feature processors of TorchRec's FeatureProcessedEmbeddingBagCollection."""

from collections.abc import Mapping

from torch import nn
from torchrec.modules.feature_processor_ import FeatureProcessorsCollection
from torchrec.modules.fp_embedding_modules import FeatureProcessedEmbeddingBagCollection

__all__ = ["position_limits"]


def position_limits(module: FeatureProcessedEmbeddingBagCollection) -> dict[str, int]:
    """Returns how many positions each feature's processor has weights for, where it has any."""
    processors: Mapping[str, nn.Module] | FeatureProcessorsCollection = module._feature_processors
    if isinstance(processors, FeatureProcessorsCollection):
        return dict(getattr(processors, "max_feature_lengths", {}))
    return {
        feature: processor.position_weight.numel()  # type: ignore[operator, union-attr]
        for feature, processor in processors.items()
        if hasattr(processor, "position_weight")
    }
