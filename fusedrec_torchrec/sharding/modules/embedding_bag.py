"""``ShardedEmbeddingBagCollection`` with fused tables."""

from contextlib import AbstractContextManager
from typing import Any

import torch
from tensordict import TensorDict
from torchrec.distributed.embedding_sharding import (
    EmbeddingSharding,
    EmbeddingShardingContext,
    EmbeddingShardingInfo,
    KJTListSplitsAwaitable,
)
from torchrec.distributed.embedding_types import KJTList
from torchrec.distributed.embeddingbag import (
    EmbeddingBagCollectionContext,
    ShardedEmbeddingBagCollection,
    VariableBatchEmbeddingBagCollectionAwaitable,
)
from torchrec.distributed.types import (
    Awaitable,
    LazyAwaitable,
    QuantizedCommCodecs,
    ShardingEnv,
    ShardingType,
)
from torchrec.modules.embedding_configs import PoolingType
from torchrec.modules.embedding_modules import EmbeddingBagCollectionInterface
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor, KeyedTensor

from fusedrec_torchrec.compat.awaitables import parts_of_pooled
from fusedrec_torchrec.compat.empty_batches import splits_nothing
from fusedrec_torchrec.compat.id_group import ids_apart
from fusedrec_torchrec.compat.inference_mode import outside_inference_mode
from fusedrec_torchrec.compat.model_trackers import refuse_tracker
from fusedrec_torchrec.exchange.outgoing_batch import BatchNotes
from fusedrec_torchrec.sharding.embedding_sharding import FusedEmbeddingSharding
from fusedrec_torchrec.sharding.modules.end_of_data import StockStandIn
from fusedrec_torchrec.sharding.modules.fused_tables import (
    CheckNames,
    FusedTables,
    with_one_fused_type,
)
from fusedrec_torchrec.sharding.modules.module_set import ModuleSet
from fusedrec_torchrec.sharding.sharding_type import FUSED, FUSED_TYPES, LOOKS_LIKE

__all__ = ["FusedShardedEmbeddingBagCollection"]

# Stock shardings whose mean pooling TorchRec does after the output dist, by a divisor.
MEAN_BY_DIVISOR = (ShardingType.ROW_WISE.value, ShardingType.TABLE_ROW_WISE.value)


class FusedShardedEmbeddingBagCollection(ShardedEmbeddingBagCollection):
    """``ShardedEmbeddingBagCollection`` with fused tables.

    Args:
        modules: all modules that share their batches; takes this one.
        check_names: refuses names that no module has, with the first batch.
        *args, **kwargs: those of ``ShardedEmbeddingBagCollection``.
    """

    def __init__(
        self,
        *args: Any,
        modules: ModuleSet,
        check_names: CheckNames,
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        features = (f for c in self._embedding_bag_configs for f in c.feature_names)
        self._ahead = modules.add(self, features, self._env, self._module_fqn)
        self.fused: FusedTables | None = None
        self._stock_stand_in: StockStandIn | None = None
        self._slot_names = [
            name for sharding in self._embedding_shardings for name in sharding.feature_names()
        ]
        if FUSED not in self._sharding_types:
            return
        self.fused = FusedTables(
            self._embedding_bag_configs,
            self.module_sharding_plan,
            dict(zip(self._sharding_types, self._embedding_shardings, strict=True)),
            modules.features,
            check_names,
            self._ahead.forget,
            self._is_weighted,
            self._device,
        )
        modules.add_fused_tables(table.name for table in self.fused.tables.tables)
        self._divisor_free = self._columns_without_divisor()
        # TorchRec takes the order of features from the first batch; ours is canonical.
        self._create_input_dist(self.fused.features.names)
        if self._has_mean_pooling_callback:
            self._init_mean_pooling_callback(self.fused.features.names, None)
        self._has_uninitialized_input_dist = False

    @classmethod
    def create_grouped_sharding_infos(
        cls, module: EmbeddingBagCollectionInterface, *args: Any, **kwargs: Any
    ) -> dict[str, list[EmbeddingShardingInfo]]:
        """Returns tables by sharding type; all types of fused tables are one, in one exchange."""
        grouped = super().create_grouped_sharding_infos(module, *args, **kwargs)
        order = [config.name for config in module.embedding_bag_configs()]
        return with_one_fused_type(grouped, order)

    @classmethod
    def create_embedding_bag_sharding(
        cls,
        sharding_infos: list[EmbeddingShardingInfo],
        env: ShardingEnv,
        device: torch.device | None = None,
        permute_embeddings: bool = False,
        qcomm_codecs_registry: dict[str, QuantizedCommCodecs] | None = None,
    ) -> EmbeddingSharding[Any, Any, Any, Any]:
        if sharding_infos[0].param_sharding.sharding_type in FUSED_TYPES:
            return FusedEmbeddingSharding(
                sharding_infos, env, device, qcomm_codecs_registry=qcomm_codecs_registry
            )
        return super().create_embedding_bag_sharding(
            sharding_infos, env, device, permute_embeddings, qcomm_codecs_registry
        )

    def _initialize_torch_state(self, skip_registering: bool = False) -> None:
        """Describes fused tables as the stock ones whose shards look the same.

        On ranks without a shard TorchRec works out the shape of DTensors from names that it knows.
        """
        plan = self.module_sharding_plan
        types = {name: entry.sharding_type for name, entry in plan.items()}
        try:
            for name, sharding_type in types.items():
                plan[name].sharding_type = LOOKS_LIKE.get(sharding_type, sharding_type)
            super()._initialize_torch_state(skip_registering)
        finally:
            for name, sharding_type in types.items():
                plan[name].sharding_type = sharding_type

    def register_post_lookup_tracker_fn(self, record_fn: Any) -> None:
        if self.fused is not None:
            plan = self.module_sharding_plan
            refuse_tracker(name for name in plan if plan[name].sharding_type in FUSED_TYPES)
        super().register_post_lookup_tracker_fn(record_fn)

    def _create_input_dist(self, *args: Any, **kwargs: Any) -> None:
        shardings = self._embedding_shardings
        stock = [
            sharding for sharding in shardings if not isinstance(sharding, FusedEmbeddingSharding)
        ]
        with ids_apart(stock, self._device or torch.device("cpu")):
            super()._create_input_dist(*args, **kwargs)

    @property
    def only_fused(self) -> bool:
        """Whether all tables are fused."""
        return self.fused is not None and len(self._embedding_shardings) == 1

    def plain_call(self) -> AbstractContextManager[None]:
        """Surrounds a call of the module in the plain way, by itself or through one around it."""
        return self._ahead.call(self)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Is called by plain loops; pipelines replace it."""
        with self.plain_call():
            return super().forward(*args, **kwargs)

    @outside_inference_mode
    def input_dist(
        self, ctx: EmbeddingBagCollectionContext, features: KeyedJaggedTensor | TensorDict
    ) -> Awaitable[Awaitable[KJTList]]:
        self._ahead.sent(self)
        if self.fused is None:
            self._stock_stand_in = StockStandIn(features, self._slot_names)
            return super().input_dist(ctx, features)
        batch, notes = self.fused.canonical(features, self.training)
        return self._fused_input_dist(ctx, batch, notes)

    def end_of_data_dist(self, ctx: EmbeddingBagCollectionContext) -> Awaitable[Awaitable[KJTList]]:
        if self.fused is not None:
            return self._fused_input_dist(ctx, *self.fused.end_of_data(self.training))
        assert self._stock_stand_in is not None, "nothing was sent before"
        return super().input_dist(ctx, self._stock_stand_in.batch())

    def _fused_input_dist(
        self, ctx: EmbeddingBagCollectionContext, batch: KeyedJaggedTensor, notes: BatchNotes
    ) -> Awaitable[Awaitable[KJTList]]:
        assert self.fused is not None
        inverse_indices = batch.inverse_indices_or_none()
        if inverse_indices is not None and self._inverse_indices_permute_indices is None:
            self._create_inverse_indices_permute_indices(inverse_indices)
            if self._has_mean_pooling_callback:
                self._init_mean_pooling_callback(batch.keys(), inverse_indices)
        with self.fused.input_dist(self._input_dists).noting(notes), splits_nothing(batch):
            awaitable = self._send(ctx, batch)
        ctx.sharding_contexts[self.fused.index] = self.fused.context_of(awaitable)
        if ctx.divisor is not None:
            ctx.divisor[:, self._divisor_free] = 1
        return awaitable

    def _send(
        self, ctx: EmbeddingBagCollectionContext, batch: KeyedJaggedTensor
    ) -> Awaitable[Awaitable[KJTList]]:
        """Starts the input dists of all shardings.

        TorchRec splits the batch among them, for which it counts ids on the host.  If all tables
        are fused, there is nothing to split.
        """
        if len(self._input_dists) > 1 or self._has_mean_pooling_callback:
            return super().input_dist(ctx, batch)
        ctx.variable_batch_per_feature = batch.variable_stride_per_key()
        ctx.inverse_indices = batch.inverse_indices_or_none()
        with torch.no_grad():
            awaitables = [self._input_dists[0](batch)]
        ctx.sharding_contexts.append(EmbeddingShardingContext())
        return KJTListSplitsAwaitable(awaitables, ctx, self._module_fqn, self._sharding_types)

    @outside_inference_mode
    def output_dist(
        self, ctx: EmbeddingBagCollectionContext, output: list[torch.Tensor]
    ) -> LazyAwaitable[KeyedTensor]:
        self._ahead.used(self)
        pooled = self._unless_empty(ctx, super().output_dist(ctx, output))
        return self._ahead.watch_output(pooled)

    def take_context(self, ctx: EmbeddingBagCollectionContext, received: KJTList) -> None:
        """Makes the context that of the batch which has arrived."""
        if self.fused is not None:
            self.fused.take_context(ctx.sharding_contexts, received)

    def compute(
        self, ctx: EmbeddingBagCollectionContext, dist_input: KJTList
    ) -> list[torch.Tensor]:
        self.take_context(ctx, dist_input)
        return super().compute(ctx, dist_input)

    @outside_inference_mode
    def compute_and_output_dist(
        self, ctx: EmbeddingBagCollectionContext, input: KJTList
    ) -> LazyAwaitable[KeyedTensor]:
        self.take_context(ctx, input)
        self._ahead.used(self)
        pooled = self._unless_empty(ctx, super().compute_and_output_dist(ctx, input))
        return self._ahead.watch_output(pooled)

    def _unless_empty(
        self, ctx: EmbeddingBagCollectionContext, pooled: LazyAwaitable[KeyedTensor]
    ) -> LazyAwaitable[KeyedTensor]:
        if not ctx.variable_batch_per_feature or ctx.inverse_indices is None:
            return pooled
        if ctx.inverse_indices[1].numel():
            return pooled
        assert isinstance(pooled, VariableBatchEmbeddingBagCollectionAwaitable)
        return EmptyBatchAwaitable(
            parts_of_pooled(pooled), self._embedding_names, self._embedding_dims
        )

    def _columns_without_divisor(self) -> torch.Tensor:
        """Returns the columns that TorchRec's divisor for row-wise mean pooling must leave alone.

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


class EmptyBatchAwaitable(LazyAwaitable[KeyedTensor]):
    """The output for a variable batch of no samples, which TorchRec cannot reshape."""

    def __init__(
        self, awaitables: list[Awaitable[torch.Tensor]], names: list[str], dims: list[int]
    ) -> None:
        super().__init__()
        self._awaitables = awaitables
        self._names = names
        self._dims = dims

    def _wait_impl(self) -> KeyedTensor:
        flat = torch.cat([awaitable.wait().flatten() for awaitable in self._awaitables])
        return KeyedTensor(self._names, self._dims, flat[:0].view(0, sum(self._dims)))
