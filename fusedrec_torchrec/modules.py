"""The sharded modules: TorchRec's own, which also know ``fused_row_wise``.

Fused and stock tables live side by side in one module; everything but the fused tables' stages
is inherited: state dicts, optimizers, pipelines, stock shardings.
"""

from typing import Any

import torch
from tensordict import TensorDict
from torchrec.distributed.embedding import (
    EmbeddingCollectionAwaitable,
    EmbeddingCollectionContext,
    ShardedEmbeddingCollection,
)
from torchrec.distributed.embedding_sharding import (
    EmbeddingSharding,
    EmbeddingShardingInfo,
    KJTListSplitsAwaitable,
)
from torchrec.distributed.embedding_types import KJTList
from torchrec.distributed.embeddingbag import (
    EmbeddingBagCollectionContext,
    ShardedEmbeddingBagCollection,
)
from torchrec.distributed.fp_embeddingbag import ShardedFeatureProcessedEmbeddingBagCollection
from torchrec.distributed.types import (
    Awaitable,
    LazyAwaitable,
    QuantizedCommCodecs,
    ShardingEnv,
    ShardingType,
)
from torchrec.modules.embedding_configs import PoolingType
from torchrec.modules.fp_embedding_modules import apply_feature_processors_to_kjt
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor, KeyedTensor

from fusedrec_torchrec.exchange.context import FusedShardingContext
from fusedrec_torchrec.exchange.features import CanonicalFeatures
from fusedrec_torchrec.exchange.input_dist import FusedInputDist
from fusedrec_torchrec.exchange.options import ExchangeOptions
from fusedrec_torchrec.exchange.variable_batch import expand_sequences
from fusedrec_torchrec.sharding import FusedEmbeddingSharding
from fusedrec_torchrec.sharding_type import FusedShardingType

__all__ = [
    "FusedShardedEmbeddingBagCollection",
    "FusedShardedEmbeddingCollection",
    "FusedShardedFeatureProcessedEmbeddingBagCollection",
]

FUSED = FusedShardingType.FUSED_ROW_WISE.value
# Stock shardings whose mean pooling TorchRec does after the output dist, by a divisor.
MEAN_BY_DIVISOR = (ShardingType.ROW_WISE.value, ShardingType.TABLE_ROW_WISE.value)


def _canonical_features(
    shardings: list[EmbeddingSharding[Any, Any, Any, Any]],
    options: ExchangeOptions,
    known_features: set[str],
    weighted: bool,
    device: torch.device | None,
) -> CanonicalFeatures:
    names = [name for sharding in shardings for name in sharding.feature_names()]
    known_features.update(names)
    return CanonicalFeatures(
        names,
        known=known_features,
        refuse_extra=options.extra_features == "error",
        weighted=weighted,
        device=device or torch.device("cpu"),
    )


def _canonical_or_rejected(
    canonical: CanonicalFeatures, features: object, input_dist: FusedInputDist
) -> KeyedJaggedTensor:
    """The batch in canonical order; a bad one is replaced, and reported to all ranks."""
    try:
        return canonical(features)  # type: ignore[arg-type]
    except ValueError as error:
        input_dist.reject(str(error))
        return canonical.stand_in(features)


class FusedShardedEmbeddingBagCollection(ShardedEmbeddingBagCollection):
    """``ShardedEmbeddingBagCollection`` with fused tables.

    Args:
        options: settings of the fused exchange.
        known_features: features of all modules that share their batches; grows with each module.
        *args, **kwargs: those of ``ShardedEmbeddingBagCollection``.
    """

    def __init__(
        self,
        *args: Any,
        options: ExchangeOptions,
        known_features: set[str],
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        self._fused_index = (
            self._sharding_types.index(FUSED) if FUSED in self._sharding_types else None
        )
        for sharding in self._embedding_shardings:
            if isinstance(sharding, FusedEmbeddingSharding):
                sharding.options = options
        self._canonical = _canonical_features(
            self._embedding_shardings, options, known_features, self._is_weighted, self._device
        )
        self._divisor_free = self._columns_without_divisor()
        if self._fused_index is not None:
            # TorchRec takes the order of features from the first batch; ours is canonical.
            self._create_input_dist(self._canonical._names)
            if self._has_mean_pooling_callback:
                self._init_mean_pooling_callback(self._canonical._names, None)
            self._has_uninitialized_input_dist = False

    @property
    def fused_input_dist(self) -> FusedInputDist | None:
        """The input dist of the fused tables, if there are any."""
        return None if self._fused_index is None else self._input_dists[self._fused_index]  # type: ignore[return-value]

    @classmethod
    def create_embedding_bag_sharding(
        cls,
        sharding_infos: list[EmbeddingShardingInfo],
        env: ShardingEnv,
        device: torch.device | None = None,
        permute_embeddings: bool = False,
        qcomm_codecs_registry: dict[str, QuantizedCommCodecs] | None = None,
    ) -> EmbeddingSharding[Any, Any, Any, Any]:
        if sharding_infos[0].param_sharding.sharding_type == FUSED:
            return FusedEmbeddingSharding(
                sharding_infos, env, device, qcomm_codecs_registry=qcomm_codecs_registry
            )
        return super().create_embedding_bag_sharding(
            sharding_infos, env, device, permute_embeddings, qcomm_codecs_registry
        )

    def input_dist(  # type: ignore[override]
        self, ctx: EmbeddingBagCollectionContext, features: KeyedJaggedTensor | TensorDict
    ) -> Awaitable[Awaitable[KJTList]]:
        if self._fused_index is None:
            return super().input_dist(ctx, features)
        assert self.fused_input_dist is not None
        batch = _canonical_or_rejected(self._canonical, features, self.fused_input_dist)
        inverse_indices = batch.inverse_indices_or_none()
        if inverse_indices is not None and self._inverse_indices_permute_indices is None:
            self._create_inverse_indices_permute_indices(inverse_indices)
            if self._has_mean_pooling_callback:
                self._init_mean_pooling_callback(batch.keys(), inverse_indices)
        awaitable = super().input_dist(ctx, batch)
        assert isinstance(awaitable, KJTListSplitsAwaitable)
        ctx.sharding_contexts[self._fused_index] = awaitable.awaitables[self._fused_index].context  # type: ignore[attr-defined]
        if ctx.divisor is not None:
            ctx.divisor[:, self._divisor_free] = 1
        return awaitable

    def _columns_without_divisor(self) -> torch.Tensor:
        """Output columns that TorchRec's divisor for row-wise mean pooling must leave alone.

        As soon as one row-wise table is mean-pooled, TorchRec divides all columns by the lengths
        of their bags plus an epsilon, also those that were pooled already and those of sums.
        """
        mean: dict[str, bool] = {}
        for config in self._embedding_bag_configs:
            is_mean = config.pooling == PoolingType.MEAN
            # Outputs are named by the feature, or by both if several tables have the feature.
            for feature in config.feature_names:
                mean[feature] = mean[f"{feature}@{config.name}"] = is_mean
        untouched: list[bool] = []
        for sharding_type, sharding in zip(
            self._sharding_types, self._embedding_shardings, strict=True
        ):
            for name, dim in zip(
                sharding.embedding_names(), sharding.embedding_dims(), strict=True
            ):
                divided = sharding_type in MEAN_BY_DIVISOR and mean[name]
                untouched.extend([not divided] * dim)
        return torch.tensor(untouched, device=self._device).nonzero().flatten()


class FusedShardedEmbeddingCollection(ShardedEmbeddingCollection):
    """``ShardedEmbeddingCollection`` with fused tables.

    Args:
        options: settings of the fused exchange.
        known_features: features of all modules that share their batches; grows with each module.
        *args, **kwargs: those of ``ShardedEmbeddingCollection``.
    """

    def __init__(
        self,
        *args: Any,
        options: ExchangeOptions,
        known_features: set[str],
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        self._fused_index = (
            self._sharding_types.index(FUSED) if FUSED in self._sharding_types else None
        )
        shardings = list(self._sharding_type_to_sharding.values())
        for sharding in shardings:
            if isinstance(sharding, FusedEmbeddingSharding):
                sharding.options = options
        self._canonical = _canonical_features(
            shardings, options, known_features, weighted=False, device=self._device
        )
        if self._fused_index is not None:
            self._create_input_dist(self._canonical._names)
            self._has_uninitialized_input_dist = False

    @property
    def fused_input_dist(self) -> FusedInputDist | None:
        """The input dist of the fused tables, if there are any."""
        return None if self._fused_index is None else self._input_dists[self._fused_index]  # type: ignore[return-value]

    @classmethod
    def create_embedding_sharding(
        cls,
        sharding_type: str,
        sharding_infos: list[EmbeddingShardingInfo],
        env: ShardingEnv,
        device: torch.device | None = None,
        qcomm_codecs_registry: dict[str, QuantizedCommCodecs] | None = None,
    ) -> EmbeddingSharding[Any, Any, Any, Any]:
        if sharding_type == FUSED:
            return FusedEmbeddingSharding(
                sharding_infos,
                env,
                device,
                pooled=False,
                qcomm_codecs_registry=qcomm_codecs_registry,
            )
        return super().create_embedding_sharding(
            sharding_type, sharding_infos, env, device, qcomm_codecs_registry
        )

    def input_dist(  # type: ignore[override]
        self, ctx: EmbeddingCollectionContext, features: KeyedJaggedTensor | TensorDict
    ) -> Awaitable[Awaitable[KJTList]]:
        if self._fused_index is None:
            return super().input_dist(ctx, features)
        assert self.fused_input_dist is not None
        batch = _canonical_or_rejected(self._canonical, features, self.fused_input_dist)
        awaitable = super().input_dist(ctx, batch)
        assert isinstance(awaitable, KJTListSplitsAwaitable)
        context = awaitable.awaitables[self._fused_index].context  # type: ignore[attr-defined]
        ctx.sharding_contexts[self._fused_index] = context
        if ctx.seq_vbe_ctx:
            expand_sequences(
                context,
                ctx.seq_vbe_ctx[self._fused_index],
                self.fused_input_dist.layout.buckets,
            )
        return awaitable

    def output_dist(
        self, ctx: EmbeddingCollectionContext, output: list[torch.Tensor]
    ) -> LazyAwaitable[dict[str, JaggedTensor]]:
        return self._finished(ctx, super().output_dist(ctx, output))

    def compute_and_output_dist(
        self, ctx: EmbeddingCollectionContext, input: KJTList
    ) -> LazyAwaitable[dict[str, JaggedTensor]]:
        return self._finished(ctx, super().compute_and_output_dist(ctx, input))

    def _finished(
        self, ctx: EmbeddingCollectionContext, sequences: LazyAwaitable[dict[str, JaggedTensor]]
    ) -> LazyAwaitable[dict[str, JaggedTensor]]:
        if self._fused_index is None:
            return sequences
        if ctx.seq_vbe_ctx:  # expanded already, TorchRec must not do it again
            ctx.seq_vbe_ctx[self._fused_index] = None  # type: ignore[call-overload]
        features = ctx.sharding_contexts[0].features_before_input_dist
        if features is None or features.lengths().numel():
            return sequences
        assert isinstance(sequences, EmbeddingCollectionAwaitable)
        return EmptySequencesAwaitable(
            sequences._awaitables_per_sharding, self._embedding_names_per_sharding
        )


class EmptySequencesAwaitable(LazyAwaitable[dict[str, JaggedTensor]]):
    """The output for a batch of no samples, which TorchRec cannot cut into sequences."""

    def __init__(
        self, awaitables: list[Awaitable[torch.Tensor]], names_per_sharding: list[list[str]]
    ) -> None:
        super().__init__()
        self._parts = list(zip(awaitables, names_per_sharding, strict=True))

    def _wait_impl(self) -> dict[str, JaggedTensor]:
        sequences: dict[str, JaggedTensor] = {}
        for awaitable, names in self._parts:
            values = awaitable.wait()
            lengths = torch.empty(0, dtype=torch.int32, device=values.device)
            sequences |= {name: JaggedTensor(values, lengths=lengths) for name in names}
        return sequences


class FusedShardedFeatureProcessedEmbeddingBagCollection(
    ShardedFeatureProcessedEmbeddingBagCollection
):
    """``ShardedFeatureProcessedEmbeddingBagCollection`` with fused tables.

    Stock shardings process features after the input dist, on the owner.  Deduplicated ids have
    lost their positions there, so fused features are processed on the requester, where they
    pool; the processors' gradients are those of the local batch, which DDP averages.
    """

    _embedding_bag_collection: FusedShardedEmbeddingBagCollection

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        # Weights are the processors' output, batches need not bring any.
        self._embedding_bag_collection._canonical._weighted = False

    def compute(
        self, ctx: EmbeddingBagCollectionContext, dist_input: KJTList
    ) -> list[torch.Tensor]:
        self._process_on_requester(ctx)
        return super().compute(ctx, dist_input)

    def compute_and_output_dist(
        self, ctx: EmbeddingBagCollectionContext, input: KJTList
    ) -> LazyAwaitable[KeyedTensor]:
        self._process_on_requester(ctx)
        return super().compute_and_output_dist(ctx, input)

    def apply_feature_processors_to_kjt_list(self, dist_input: KJTList) -> KJTList:
        fused = self._embedding_bag_collection._fused_index
        processed = [
            features
            if i == fused
            else super(
                FusedShardedFeatureProcessedEmbeddingBagCollection, self
            ).apply_feature_processors_to_kjt_list(KJTList([features]))[0]
            for i, features in enumerate(dist_input)
        ]
        return KJTList(processed)

    def _process_on_requester(self, ctx: EmbeddingBagCollectionContext) -> None:
        fused = self._embedding_bag_collection._fused_index
        if fused is None:
            return
        context = ctx.sharding_contexts[fused]
        assert isinstance(context, FusedShardingContext)
        features = context.features_before_input_dist
        assert features is not None
        processed = (
            self._feature_processors(features)
            if self._is_collection
            else apply_feature_processors_to_kjt(features, self._feature_processors)  # type: ignore[arg-type]
        )
        context.weights_N = processed.weights()
