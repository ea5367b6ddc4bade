"""Sharding options of ``fused_row_wise`` among TorchRec's own.

TorchRec's enumerator raises on sharding types it does not know.  To it, a fused option is a
row-wise one (rows are split over all ranks in the same way); it gets its own name as soon as the
options are made.
"""

from torch import nn
from torchrec.distributed.planner.enumerators import EmbeddingEnumerator
from torchrec.distributed.planner.types import ShardingOption
from torchrec.distributed.types import ModuleSharder, ShardingType
from torchrec.modules.embedding_configs import BaseEmbeddingConfig, DataType
from torchrec.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection
from torchrec.modules.fp_embedding_modules import FeatureProcessedEmbeddingBagCollection

from fusedrec_torchrec.compat.feature_processors import embedding_bags_of
from fusedrec_torchrec.compat.optimizers import optimizer_of, optimizers_of
from fusedrec_torchrec.exchange.buckets import kernels_of
from fusedrec_torchrec.planner.cost.fusing import fusing_pays
from fusedrec_torchrec.planner.option_load import option_load
from fusedrec_torchrec.sharding.sharding_type import FUSED

__all__ = ["FusedEnumerator", "configs_of", "is_fused", "unfit_tables"]


class _FusedAsRowWise(str):
    """Is the string ``"row_wise"``, to be told apart from a real one only by its class."""

    __slots__ = ()


FUSED_AS_ROW_WISE = _FusedAsRowWise(ShardingType.ROW_WISE.value)


def is_fused(option: ShardingOption) -> bool:
    """Returns whether a sharding option is one of ours."""
    return bool(option.sharding_type == FUSED)


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


class FusedEnumerator(EmbeddingEnumerator):
    """Is TorchRec's ``EmbeddingEnumerator`` that knows ``fused_row_wise``, with its arguments."""

    def enumerate(
        self, module: nn.Module, sharders: list[ModuleSharder[nn.Module]]
    ) -> list[ShardingOption]:
        self._cannot_be_fused = unfit_tables(module, sharders, self._compute_device)
        options = super().enumerate(module, sharders)
        return [option for option in options if not is_fused(option) or self._pays(option)]

    def _pays(self, option: ShardingOption) -> bool:
        """Returns whether a fused option is worth a thought; the only choice always is."""
        mine = (self._constraints or {}).get(option.name)
        if mine is not None and mine.sharding_types == [FUSED]:
            return True
        return fusing_pays(option_load(option, self._constraints), batch=1)

    def populate_estimates(self, sharding_options: list[ShardingOption]) -> None:
        for option in sharding_options:
            if isinstance(option.sharding_type, _FusedAsRowWise):
                option.sharding_type = FUSED
        super().populate_estimates(sharding_options)

    def _filter_sharding_types(
        self, name: str, allowed_sharding_types: list[str], sharder_key: str = ""
    ) -> list[str]:
        constraints = (self._constraints or {}).get(name)
        asked = (constraints and constraints.sharding_types) or []
        row_wise = ShardingType.ROW_WISE.value
        if row_wise in asked and row_wise not in allowed_sharding_types:
            # TorchRec's sharders do not offer it on CPU, where it works, too.
            allowed_sharding_types = [*allowed_sharding_types, row_wise]
        types = super()._filter_sharding_types(name, allowed_sharding_types, sharder_key)
        if name in self._cannot_be_fused and types != [FUSED]:  # if asked for, it is an error
            types = [t for t in types if t != FUSED]
        # Sorted: TorchRec's own order is that of a set, which differs from run to run.
        return [FUSED_AS_ROW_WISE if t == FUSED else t for t in sorted(types)]

    def _filter_compute_kernels(
        self, name: str, allowed_compute_kernels: list[str], sharding_type: str
    ) -> list[str]:
        if isinstance(sharding_type, _FusedAsRowWise):
            kernels = kernels_of(self._compute_device)
            allowed_compute_kernels = [k for k in allowed_compute_kernels if k in kernels]
        kernels = super()._filter_compute_kernels(name, allowed_compute_kernels, sharding_type)
        return sorted(kernels)
