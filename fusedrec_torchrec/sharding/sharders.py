"""Sharders to register in ``DistributedModelParallel``: TorchRec's own, plus fused tables."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torchrec.distributed.embedding import EmbeddingCollectionSharder
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.fp_embeddingbag import FeatureProcessedEmbeddingBagCollectionSharder
from torchrec.distributed.sharding_plan import get_default_sharders
from torchrec.distributed.types import (
    ModuleSharder,
    ParameterSharding,
    QuantizedCommCodecs,
    ShardingEnv,
    ShardingEnv2D,
)
from torchrec.modules.embedding_configs import BaseEmbeddingConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection
from torchrec.modules.fp_embedding_modules import FeatureProcessedEmbeddingBagCollection

from fusedrec_torchrec.codecs.registry import codecs_of_registry
from fusedrec_torchrec.compat.momentum_scale import (
    resolve_fused_params,
    resolve_parameters,
    scale_lookups,
    without_scale,
)
from fusedrec_torchrec.compat.stock_planner import stock_enumerator_asks
from fusedrec_torchrec.core.device import DEVICES
from fusedrec_torchrec.exchange.buckets import kernels_of
from fusedrec_torchrec.exchange.options import ExchangeOptions
from fusedrec_torchrec.hot.options import HotOptions
from fusedrec_torchrec.sharding.module_settings import ProcessedFeatures, resolve_plan
from fusedrec_torchrec.sharding.modules.agreement import check_agreement
from fusedrec_torchrec.sharding.modules.checks import check_dense_sequences, check_frozen
from fusedrec_torchrec.sharding.modules.embedding import FusedShardedEmbeddingCollection
from fusedrec_torchrec.sharding.modules.embedding_bag import FusedShardedEmbeddingBagCollection
from fusedrec_torchrec.sharding.modules.feature_processed import (
    FusedShardedFeatureProcessedEmbeddingBagCollection,
    processed_features_of,
)
from fusedrec_torchrec.sharding.modules.module_set import ModuleSet
from fusedrec_torchrec.sharding.sharding_type import FUSED, FUSED_TYPES

__all__ = [
    "FusedEmbeddingBagCollectionSharder",
    "FusedEmbeddingCollectionSharder",
    "FusedFeatureProcessedEmbeddingBagCollectionSharder",
    "fused_sharders",
]


# The modules of sharders that were made one by one.
STANDALONE = ModuleSet()


class _FusedTypeMixin:
    """Adds the fused sharding types and their kernels to what a sharder offers to planners."""

    fused_types: tuple[str, ...] = (FUSED,)
    """The types that tables of its modules can have."""

    def sharding_types(self, compute_device_type: str) -> list[str]:
        types: list[str] = super().sharding_types(compute_device_type)  # type: ignore[misc]
        if compute_device_type not in DEVICES:
            return types
        return [*types, *self.fused_types]

    def compute_kernels(self, sharding_type: str, compute_device_type: str) -> list[str]:
        if sharding_type not in FUSED_TYPES:
            kernels: list[str] = super().compute_kernels(sharding_type, compute_device_type)  # type: ignore[misc]
            return kernels
        if stock_enumerator_asks():
            raise ValueError(
                f"TorchRec's own planner does not know the sharding type {sharding_type}. Pass a "
                "plan to DistributedModelParallel, plan=fr.FusedShardingPlanner().collective_plan("
                "model, sharders) with `import fusedrec_torchrec as fr`, and use "
                "FusedShardingPlanner in the place of EmbeddingShardingPlanner; or restrict all "
                "tables to TorchRec's sharding types by ParameterConstraints(sharding_types=[...])"
            )
        return kernels_of(compute_device_type)


class _FusedTableSharder(_FusedTypeMixin):
    """What the sharders of EmbeddingBagCollection and EmbeddingCollection have in common."""

    def __init__(
        self,
        *args: Any,
        options: ExchangeOptions | None = None,
        hot: HotOptions | None = None,
        modules: ModuleSet | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        self._options = options or ExchangeOptions()
        self._hot = hot or HotOptions()
        self._modules = modules or STANDALONE

    @property
    def fused_params(self) -> dict[str, Any] | None:
        """The settings of FBGEMM's tables as planners understand them."""
        return without_scale(self._fused_params)  # type: ignore[attr-defined]

    def _resolved(self, module: nn.Module, env: ShardingEnv) -> dict[str, Any] | None:
        """Returns the settings as FBGEMM understands them, and resolves the module's optimizers."""
        groups = env.num_sharding_groups() if isinstance(env, ShardingEnv2D) else 1
        resolve_parameters(module, groups)
        return resolve_fused_params(self._fused_params, groups)  # type: ignore[attr-defined]

    def _check(
        self,
        module: EmbeddingBagCollection | EmbeddingCollection,
        configs: Sequence[BaseEmbeddingConfig],
        params: dict[str, ParameterSharding],
        env: ShardingEnv,
        device: torch.device | None,
        module_fqn: str | None,
    ) -> None:
        """Refuses what ranks were given differently, and what would be trained wrongly."""
        hashed = [config.name for config in configs if self._options.hashes(config.name)]
        settings = {
            "fused_params": self._fused_params,  # type: ignore[attr-defined]
            "qcomm_codecs_registry": self.qcomm_codecs_registry,  # type: ignore[attr-defined]
            # The same tables may be named in many ways.
            "options": replace(self._options, hash_ids=hashed),
            "hot": self._hot,
        }
        check_agreement(module, configs, params, env, device, module_fqn, settings)
        check_frozen(module, params)

    def _resolve_plan(
        self,
        params: dict[str, ParameterSharding],
        pooled: bool,
        processed: ProcessedFeatures | None = None,
    ) -> dict[str, ParameterSharding]:
        """Returns the plan with all that this sharder's settings and feature processors say."""
        codecs = codecs_of_registry(self.qcomm_codecs_registry, pooled)  # type: ignore[attr-defined]
        return resolve_plan(params, self._options, self._hot, codecs, processed)

    def _check_names(self) -> None:
        """Refuses settings that name tables which no module has."""
        self._modules.check(self._options, self._hot)


class FusedEmbeddingBagCollectionSharder(_FusedTableSharder, EmbeddingBagCollectionSharder):
    """TorchRec's ``EmbeddingBagCollectionSharder`` with all fused sharding types.

    Args:
        fused_params, qcomm_codecs_registry, sharded_module_order_overwrite: as in TorchRec.
        options: settings of the fused exchange.
        hot: rows to replicate on every rank; those that the plan names, if None.
        modules: those that share batches, see ``fused_sharders``; if None, those of all sharders
            of this process that were made without.
    """

    fused_types = FUSED_TYPES

    def may_be_hot(self, table: str) -> bool:
        """Returns whether this sharder's settings can make rows of a table hot."""
        hot = self._hot
        return hot.rule is not None or hot.hot_set is not None or table in hot.tables

    def shard(
        self,
        module: EmbeddingBagCollection,
        params: dict[str, ParameterSharding],
        env: ShardingEnv,
        device: torch.device | None = None,
        module_fqn: str | None = None,
        processed: ProcessedFeatures | None = None,
    ) -> FusedShardedEmbeddingBagCollection:
        """Shards a collection as in TorchRec; ``processed`` are the features with processors."""
        configs = module.embedding_bag_configs()
        self._check(module, configs, params, env, device, module_fqn)
        sharded = FusedShardedEmbeddingBagCollection(
            module,
            self._resolve_plan(params, pooled=True, processed=processed),
            env,
            self._resolved(module, env),
            device,
            qcomm_codecs_registry=self.qcomm_codecs_registry,
            module_fqn=module_fqn,
            sharded_module_order_overwrite=self._sharded_module_order_overwrite,
            modules=self._modules,
            check_names=self._check_names,
        )
        scale_lookups(sharded)
        return sharded

    @property
    def sharded_module_type(self) -> type[FusedShardedEmbeddingBagCollection]:
        return FusedShardedEmbeddingBagCollection


class FusedEmbeddingCollectionSharder(_FusedTableSharder, EmbeddingCollectionSharder):
    """TorchRec's ``EmbeddingCollectionSharder`` with ``fused_row_wise``; sequences have no other.

    Args:
        fused_params, qcomm_codecs_registry: as in TorchRec.
        use_index_dedup: as in TorchRec, for the stock tables of a module.  Fused tables always
            deduplicate, on CPU too.
        options: settings of the fused exchange.
        hot: rows to replicate on every rank; those that the plan names, if None.
        modules: those that share batches, see ``fused_sharders``; if None, those of all sharders
            of this process that were made without.
    """

    def shard(
        self,
        module: EmbeddingCollection,
        params: dict[str, ParameterSharding],
        env: ShardingEnv,
        device: torch.device | None = None,
        module_fqn: str | None = None,
    ) -> FusedShardedEmbeddingCollection:
        configs = module.embedding_configs()
        self._check(module, configs, params, env, device, module_fqn)
        check_dense_sequences(params, device)
        has_stock_tables = any(param.sharding_type not in FUSED_TYPES for param in params.values())
        # FBGEMM has the kernel that stock dedup needs on CUDA only; the result is the same.
        on_cuda = device is not None and device.type == "cuda"
        sharded = FusedShardedEmbeddingCollection(
            module,
            self._resolve_plan(params, pooled=False),
            env,
            self._resolved(module, env),
            device,
            qcomm_codecs_registry=self.qcomm_codecs_registry,
            use_index_dedup=self._use_index_dedup and has_stock_tables and on_cuda,
            module_fqn=module_fqn,
            modules=self._modules,
            check_names=self._check_names,
        )
        scale_lookups(sharded)
        return sharded

    @property
    def sharded_module_type(self) -> type[FusedShardedEmbeddingCollection]:
        return FusedShardedEmbeddingCollection


@dataclass(frozen=True)
class _ProcessedSharder:
    """Shards a collection whose features are processed, by the call that TorchRec makes."""

    sharder: FusedEmbeddingBagCollectionSharder
    processed: ProcessedFeatures

    def shard(
        self,
        module: EmbeddingBagCollection,
        params: dict[str, ParameterSharding],
        env: ShardingEnv,
        device: torch.device | None = None,
        module_fqn: str | None = None,
    ) -> FusedShardedEmbeddingBagCollection:
        return self.sharder.shard(module, params, env, device, module_fqn, self.processed)


class FusedFeatureProcessedEmbeddingBagCollectionSharder(
    _FusedTypeMixin, FeatureProcessedEmbeddingBagCollectionSharder
):
    """TorchRec's ``FeatureProcessedEmbeddingBagCollectionSharder`` with ``fused_row_wise``.

    Args:
        ebc_sharder: shards the tables; a ``FusedEmbeddingBagCollectionSharder`` if None.
        qcomm_codecs_registry: as in TorchRec.
    """

    def __init__(
        self,
        ebc_sharder: FusedEmbeddingBagCollectionSharder | None = None,
        qcomm_codecs_registry: dict[str, QuantizedCommCodecs] | None = None,
    ) -> None:
        if ebc_sharder is not None and not isinstance(
            ebc_sharder, FusedEmbeddingBagCollectionSharder
        ):
            raise ValueError(
                f"ebc_sharder is a {type(ebc_sharder).__name__}, must be a "
                "FusedEmbeddingBagCollectionSharder"
            )
        super().__init__(
            ebc_sharder
            or FusedEmbeddingBagCollectionSharder(qcomm_codecs_registry=qcomm_codecs_registry),
            qcomm_codecs_registry,
        )

    def shard(
        self,
        module: FeatureProcessedEmbeddingBagCollection,
        params: dict[str, ParameterSharding],
        env: ShardingEnv,
        device: torch.device | None = None,
        module_fqn: str | None = None,
    ) -> FusedShardedFeatureProcessedEmbeddingBagCollection:
        return FusedShardedFeatureProcessedEmbeddingBagCollection(
            module,
            params,
            ebc_sharder=_ProcessedSharder(self._ebc_sharder, processed_features_of(module)),
            env=env,
            device=device or torch.device("cuda"),
            module_fqn=module_fqn,
        )

    @property
    def sharded_module_type(self) -> type[FusedShardedFeatureProcessedEmbeddingBagCollection]:
        return FusedShardedFeatureProcessedEmbeddingBagCollection


def fused_sharders(
    fused_params: dict[str, Any] | None = None,
    qcomm_codecs_registry: dict[str, QuantizedCommCodecs] | None = None,
    options: ExchangeOptions | None = None,
    hot: HotOptions | None = None,
) -> list[ModuleSharder[nn.Module]]:
    """Makes sharders, as a drop-in for TorchRec's ``get_default_sharders()``.

    The sharders of EmbeddingBagCollection, EmbeddingCollection and feature-processed
    EmbeddingBagCollection are ours, the others TorchRec's.  Ours know the features of all modules
    they shard, so that modules can share a batch and an unknown feature is still an error.

    Args:
        fused_params: optimizer and its settings for all embedding tables, as in TorchRec.
        qcomm_codecs_registry: as in TorchRec; rows and gradients of fused tables travel as its
            all-to-alls do, unless ``options`` have codecs.
        options: settings of the fused exchange.
        hot: rows to replicate on every rank; those that the plan names, if None.
    """
    modules = ModuleSet()
    ebc = FusedEmbeddingBagCollectionSharder(
        fused_params, qcomm_codecs_registry, options=options, hot=hot, modules=modules
    )
    ours: Sequence[ModuleSharder[Any]] = (
        ebc,
        FusedEmbeddingCollectionSharder(
            fused_params, qcomm_codecs_registry, options=options, hot=hot, modules=modules
        ),
        FusedFeatureProcessedEmbeddingBagCollectionSharder(ebc, qcomm_codecs_registry),
    )
    replaced = {sharder.module_type for sharder in ours}
    others = [s for s in get_default_sharders() if s.module_type not in replaced]
    return [*ours, *others]
