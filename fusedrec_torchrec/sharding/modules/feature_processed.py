"""``ShardedFeatureProcessedEmbeddingBagCollection`` with fused tables."""

from functools import cached_property, partial
from typing import Any

import torch
from torchrec.distributed.embedding_types import KJTList
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionContext
from torchrec.distributed.fp_embeddingbag import ShardedFeatureProcessedEmbeddingBagCollection
from torchrec.distributed.types import LazyAwaitable
from torchrec.modules.fp_embedding_modules import (
    FeatureProcessedEmbeddingBagCollection,
    apply_feature_processors_to_kjt,
)
from torchrec.sparse.jagged_tensor import KeyedTensor

from fusedrec_torchrec.compat.feature_processors import position_limits, position_weights
from fusedrec_torchrec.exchange.context import FusedShardingContext
from fusedrec_torchrec.sharding.module_settings import ProcessedFeatures
from fusedrec_torchrec.sharding.modules.embedding_bag import FusedShardedEmbeddingBagCollection
from fusedrec_torchrec.sharding.modules.position_weights import PositionWeights

__all__ = ["FusedShardedFeatureProcessedEmbeddingBagCollection", "processed_features_of"]


def processed_features_of(module: FeatureProcessedEmbeddingBagCollection) -> ProcessedFeatures:
    """Returns what the feature processors of a module ask of its batches.

    Weights are the processors' output, batches need not bring any.  A bag must not have more ids
    than its processor has weights for positions.
    """
    return ProcessedFeatures(position_limits(module))


class FusedShardedFeatureProcessedEmbeddingBagCollection(
    ShardedFeatureProcessedEmbeddingBagCollection
):
    """``ShardedFeatureProcessedEmbeddingBagCollection`` with fused tables.

    Stock shardings process features after the input dist, on the owner.  Deduplicated ids have
    lost their positions there, so fused features are processed on the requester, where they
    pool; the processors' gradients are those of the local batch, which DDP averages.
    """

    _embedding_bag_collection: FusedShardedEmbeddingBagCollection

    @cached_property
    def _position_weights(self) -> PositionWeights | None:
        """What kernels do in the place of the processors; None if they cannot.

        Processors are where they stay when the first batch comes.
        """
        fused = self._embedding_bag_collection.fused
        if fused is None or fused.layout.device.type != "cuda":
            return None
        names = [feature for feature, _ in fused.layout.slot_names]
        return PositionWeights.of(partial(position_weights, self._feature_processors), names)

    def add_fp_params_grad_sync_callback(
        self, lazy_awaitable_kt: LazyAwaitable[KeyedTensor]
    ) -> LazyAwaitable[KeyedTensor]:
        """Has all processors take part in backward on all ranks, for DistributedDataParallel.

        All do already if their weights are one tensor.
        """
        weights, bags = self._position_weights, self._embedding_bag_collection
        if weights is not None and weights.available and bags.only_fused:
            return lazy_awaitable_kt
        return super().add_fp_params_grad_sync_callback(lazy_awaitable_kt)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Is called by plain loops; pipelines replace it."""
        with self._embedding_bag_collection.plain_call():
            return super().forward(*args, **kwargs)

    def compute(
        self, ctx: EmbeddingBagCollectionContext, dist_input: KJTList
    ) -> list[torch.Tensor]:
        self._embedding_bag_collection.take_context(ctx, dist_input)
        self._process_on_requester(ctx)
        return super().compute(ctx, dist_input)

    def compute_and_output_dist(
        self, ctx: EmbeddingBagCollectionContext, input: KJTList
    ) -> LazyAwaitable[KeyedTensor]:
        self._embedding_bag_collection.take_context(ctx, input)
        self._process_on_requester(ctx)
        return super().compute_and_output_dist(ctx, input)

    def apply_feature_processors_to_kjt_list(self, dist_input: KJTList) -> KJTList:
        fused = self._embedding_bag_collection.fused
        processed = [
            features
            if fused is not None and i == fused.index
            else super(
                FusedShardedFeatureProcessedEmbeddingBagCollection, self
            ).apply_feature_processors_to_kjt_list(KJTList([features]))[0]
            for i, features in enumerate(dist_input)
        ]
        return KJTList(processed)

    def _process_on_requester(self, ctx: EmbeddingBagCollectionContext) -> None:
        fused = self._embedding_bag_collection.fused
        if fused is None:
            return
        context = ctx.sharding_contexts[fused.index]
        assert isinstance(context, FusedShardingContext)
        weights, features = self._position_weights, context.features_before_input_dist
        assert features is not None
        if weights is not None and weights.available:
            context.weights_N = weights(features)
            return
        context.count_features()
        features = context.features_before_input_dist
        processed = (
            self._feature_processors(features)
            if self._is_collection
            else apply_feature_processors_to_kjt(features, self._feature_processors)
        )
        context.weights_N = processed.weights()
