"""``ShardedEmbeddingCollection`` with fused tables."""

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
from torchrec.distributed.sharding.sequence_sharding import SequenceShardingContext
from torchrec.distributed.types import (
    Awaitable,
    LazyAwaitable,
    QuantizedCommCodecs,
    ShardingEnv,
    ShardingType,
)
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor

from fusedrec_torchrec.compat.awaitables import parts_of_sequences
from fusedrec_torchrec.compat.empty_batches import splits_nothing
from fusedrec_torchrec.compat.id_group import ids_apart
from fusedrec_torchrec.compat.inference_mode import outside_inference_mode
from fusedrec_torchrec.compat.model_trackers import refuse_tracker
from fusedrec_torchrec.exchange.context import FusedShardingContext
from fusedrec_torchrec.exchange.outgoing_batch import BatchNotes
from fusedrec_torchrec.exchange.slot_bags import are_counted_on_device
from fusedrec_torchrec.exchange.variable_batch import (
    SequencePicks,
    count_sequences,
    expand_sequences,
)
from fusedrec_torchrec.sharding.embedding_sharding import FusedEmbeddingSharding
from fusedrec_torchrec.sharding.modules.dense_sequences import CpuDpSequenceEmbeddingSharding
from fusedrec_torchrec.sharding.modules.end_of_data import StockStandIn
from fusedrec_torchrec.sharding.modules.fused_tables import CheckNames, FusedTables
from fusedrec_torchrec.sharding.modules.module_set import ModuleSet
from fusedrec_torchrec.sharding.sharding_type import FUSED, FUSED_TYPES

__all__ = ["FusedShardedEmbeddingCollection"]


class FusedShardedEmbeddingCollection(ShardedEmbeddingCollection):
    """``ShardedEmbeddingCollection`` with fused tables.

    Args:
        modules: all modules that share their batches; takes this one.
        check_names: refuses names that no module has, with the first batch.
        *args, **kwargs: those of ``ShardedEmbeddingCollection``.
    """

    def __init__(
        self,
        *args: Any,
        modules: ModuleSet,
        check_names: CheckNames,
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        features = (f for c in self._embedding_configs for f in c.feature_names)
        self._ahead = modules.add(self, features, self._env, self._module_fqn)
        self.fused: FusedTables | None = None
        self._stock_stand_in: StockStandIn | None = None
        self._slot_names = [
            name
            for sharding in self._sharding_type_to_sharding.values()
            for name in sharding.feature_names()
        ]
        if FUSED not in self._sharding_types:
            return
        self.fused = FusedTables(
            self._embedding_configs,
            self.module_sharding_plan,
            self._sharding_type_to_sharding,
            modules.features,
            check_names,
            self._ahead.forget,
            weighted=False,
            device=self._device,
        )
        modules.add_fused_tables(table.name for table in self.fused.tables.tables)
        # TorchRec takes the order of features from the first batch; ours is canonical.
        self._create_input_dist(self.fused.features.names)
        self._has_uninitialized_input_dist = False

    @classmethod
    def create_embedding_sharding(
        cls,
        sharding_type: str,
        sharding_infos: list[EmbeddingShardingInfo],
        env: ShardingEnv,
        device: torch.device | None = None,
        qcomm_codecs_registry: dict[str, QuantizedCommCodecs] | None = None,
    ) -> EmbeddingSharding[Any, Any, Any, Any]:
        if sharding_type in FUSED_TYPES:  # of which sequences can only have one, it says
            return FusedEmbeddingSharding(
                sharding_infos,
                env,
                device,
                pooled=False,
                qcomm_codecs_registry=qcomm_codecs_registry,
            )
        on_cpu = device is None or device.type == "cpu"
        if sharding_type == ShardingType.DATA_PARALLEL.value and on_cpu:
            return CpuDpSequenceEmbeddingSharding(sharding_infos, env, device)
        return super().create_embedding_sharding(
            sharding_type, sharding_infos, env, device, qcomm_codecs_registry
        )

    def register_post_lookup_tracker_fn(self, record_fn: Any) -> None:
        if self.fused is not None:
            plan = self.module_sharding_plan
            refuse_tracker(name for name in plan if plan[name].sharding_type in FUSED_TYPES)
        super().register_post_lookup_tracker_fn(record_fn)

    def _create_input_dist(self, *args: Any, **kwargs: Any) -> None:
        shardings = self._sharding_type_to_sharding.values()
        stock = [
            sharding for sharding in shardings if not isinstance(sharding, FusedEmbeddingSharding)
        ]
        with ids_apart(stock, self._device or torch.device("cpu")):
            super()._create_input_dist(*args, **kwargs)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Is called by plain loops; pipelines replace it."""
        with self._ahead.call(self):
            return super().forward(*args, **kwargs)

    @outside_inference_mode
    def input_dist(
        self, ctx: EmbeddingCollectionContext, features: KeyedJaggedTensor | TensorDict
    ) -> Awaitable[Awaitable[KJTList]]:
        self._ahead.sent(self)
        if self.fused is None:
            self._stock_stand_in = StockStandIn(features, self._slot_names)
            return super().input_dist(ctx, features)
        batch, notes = self.fused.canonical(features, self.training)
        return self._fused_input_dist(ctx, batch, notes)

    def end_of_data_dist(self, ctx: EmbeddingCollectionContext) -> Awaitable[Awaitable[KJTList]]:
        if self.fused is not None:
            return self._fused_input_dist(ctx, *self.fused.end_of_data(self.training))
        assert self._stock_stand_in is not None, "nothing was sent before"
        return super().input_dist(ctx, self._stock_stand_in.batch())

    def _fused_input_dist(
        self, ctx: EmbeddingCollectionContext, batch: KeyedJaggedTensor, notes: BatchNotes
    ) -> Awaitable[Awaitable[KJTList]]:
        assert self.fused is not None
        with self.fused.input_dist(self._input_dists).noting(notes), splits_nothing(batch):
            awaitable = self._send(ctx, batch)
        context = self.fused.context_of(awaitable)
        ctx.sharding_contexts[self.fused.index] = context
        if ctx.seq_vbe_ctx:
            expand_sequences(context, ctx.seq_vbe_ctx[self.fused.index], self.fused.layout.buckets)
        elif batch.variable_stride_per_key():
            context.picks = SequencePicks(batch, self._need_indices)
        return awaitable

    def _send(
        self, ctx: EmbeddingCollectionContext, batch: KeyedJaggedTensor
    ) -> Awaitable[Awaitable[KJTList]]:
        """Starts the input dists of all shardings.

        TorchRec splits the batch among them, for which it counts ids on the host.  If all tables
        are fused, there is nothing to split.
        """
        if len(self._input_dists) > 1 or not are_counted_on_device(batch):
            return super().input_dist(ctx, batch)
        with torch.no_grad():
            awaitables = [self._input_dists[0](batch)]
        ctx.sharding_contexts.append(SequenceShardingContext(features_before_input_dist=batch))
        return KJTListSplitsAwaitable(awaitables, ctx, self._module_fqn, self._sharding_types)

    @outside_inference_mode
    def output_dist(
        self, ctx: EmbeddingCollectionContext, output: list[torch.Tensor]
    ) -> LazyAwaitable[dict[str, JaggedTensor]]:
        self._ahead.used(self)
        sequences = self._finished(ctx, super().output_dist(ctx, output))
        return self._ahead.watch_output(sequences)

    def _take_context(self, ctx: EmbeddingCollectionContext, received: KJTList) -> None:
        """Makes the context that of the batch which has arrived, with all its counts."""
        if self.fused is not None:
            self.fused.take_context(ctx.sharding_contexts, received)
            context = ctx.sharding_contexts[self.fused.index]
            assert isinstance(context, FusedShardingContext)
            count_sequences(context, self.fused.layout.buckets)

    def compute(self, ctx: EmbeddingCollectionContext, dist_input: KJTList) -> list[torch.Tensor]:
        self._take_context(ctx, dist_input)
        return super().compute(ctx, dist_input)

    @outside_inference_mode
    def compute_and_output_dist(
        self, ctx: EmbeddingCollectionContext, input: KJTList
    ) -> LazyAwaitable[dict[str, JaggedTensor]]:
        self._take_context(ctx, input)
        self._ahead.used(self)
        sequences = self._finished(ctx, super().compute_and_output_dist(ctx, input))
        return self._ahead.watch_output(sequences)

    def _finished(
        self, ctx: EmbeddingCollectionContext, sequences: LazyAwaitable[dict[str, JaggedTensor]]
    ) -> LazyAwaitable[dict[str, JaggedTensor]]:
        if self.fused is None:
            return sequences
        if ctx.seq_vbe_ctx:  # expanded already, TorchRec must not do it again
            ctx.seq_vbe_ctx[self.fused.index] = None
        features = ctx.sharding_contexts[self.fused.index].features_before_input_dist
        assert features is not None
        if features.lengths().numel():
            return sequences
        assert isinstance(sequences, EmbeddingCollectionAwaitable)
        return EmptySequencesAwaitable(
            parts_of_sequences(sequences),
            self._embedding_names_per_sharding,
            self._embedding_dim,
            self._need_indices,
        )


class EmptySequencesAwaitable(LazyAwaitable[dict[str, JaggedTensor]]):
    """The output for a batch of no samples, which TorchRec cannot cut into sequences."""

    def __init__(
        self,
        awaitables: list[Awaitable[torch.Tensor]],
        names_per_sharding: list[list[str]],
        dim: int,
        need_indices: bool,
    ) -> None:
        super().__init__()
        self._parts = list(zip(awaitables, names_per_sharding, strict=True))
        self._dim = dim
        self._need_indices = need_indices

    def _wait_impl(self) -> dict[str, JaggedTensor]:
        sequences: dict[str, JaggedTensor] = {}
        for awaitable, names in self._parts:
            # A view, so that the backward pass still reaches the exchange.
            values = awaitable.wait().flatten()[:0].view(0, self._dim)
            lengths = torch.empty(0, dtype=torch.int32, device=values.device)
            indices = torch.empty(0, dtype=torch.int64, device=values.device)
            for name in names:
                sequences[name] = JaggedTensor(
                    values, lengths=lengths, weights=indices if self._need_indices else None
                )
        return sequences
