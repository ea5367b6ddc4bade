"""Fused, deduplicated embedding sharding as a plugin for TorchRec.

A public name is imported when it is used for the first time (PEP 562), so that ``fusedrec --help``
and the check of a configuration file need not wait for torch and TorchRec.
"""

from importlib import import_module
from typing import TYPE_CHECKING

__all__ = [
    "AccessProfile",
    "AdaptOptions",
    "CodecOptions",
    "Codecs",
    "CostOptions",
    "ExchangeOptions",
    "FusedEmbeddingBagCollectionSharder",
    "FusedEmbeddingCollectionSharder",
    "FusedFeatureProcessedEmbeddingBagCollectionSharder",
    "FusedShardingPlanner",
    "FusedShardingType",
    "FusedTrainPipeline",
    "GridModelParallel",
    "GridOptions",
    "GridShardingPlan",
    "HotOptions",
    "HotRule",
    "LoadReport",
    "LostRankError",
    "MomentumScaledRowWiseAdagrad",
    "SaveError",
    "ThresholdOptions",
    "ThresholdedDataParallel",
    "fused_column_wise",
    "fused_row_wise",
    "fused_sharders",
    "fused_table_wise",
    "load_checkpoint",
    "profile_batches",
    "reconcile",
    "save_checkpoint",
]

# Public names and where they are defined; type checkers and editors read the imports below.
_DEFINED_IN = {
    "AccessProfile": "access.access_profile",
    "AdaptOptions": "hot.options",
    "CodecOptions": "codecs.options",
    "Codecs": "codecs.options",
    "CostOptions": "hot.cost",
    "ExchangeOptions": "exchange.options",
    "FusedEmbeddingBagCollectionSharder": "sharding.sharders",
    "FusedEmbeddingCollectionSharder": "sharding.sharders",
    "FusedFeatureProcessedEmbeddingBagCollectionSharder": "sharding.sharders",
    "FusedShardingPlanner": "planner.planner",
    "FusedShardingType": "sharding.sharding_type",
    "FusedTrainPipeline": "sharding.train_pipeline",
    "GridModelParallel": "grid.model_parallel",
    "GridOptions": "sharding.grid_options",
    "GridShardingPlan": "sharding.plan_entries",
    "HotOptions": "hot.options",
    "HotRule": "hot.options",
    "LoadReport": "checkpoint.load",
    "LostRankError": "core.lost_rank",
    "MomentumScaledRowWiseAdagrad": "compat.momentum_scale",
    "SaveError": "checkpoint.save",
    "ThresholdOptions": "codecs.threshold_options",
    "ThresholdedDataParallel": "codecs.dense_gradients",
    "fused_column_wise": "sharding.plan_entries",
    "fused_row_wise": "sharding.plan_entries",
    "fused_sharders": "sharding.sharders",
    "fused_table_wise": "sharding.plan_entries",
    "load_checkpoint": "checkpoint.load",
    "profile_batches": "planner.batch_profile",
    "reconcile": "hot.rows",
    "save_checkpoint": "checkpoint.save",
}

if TYPE_CHECKING:
    from fusedrec_torchrec.access.access_profile import AccessProfile
    from fusedrec_torchrec.checkpoint.load import LoadReport, load_checkpoint
    from fusedrec_torchrec.checkpoint.save import SaveError, save_checkpoint
    from fusedrec_torchrec.codecs.dense_gradients import ThresholdedDataParallel
    from fusedrec_torchrec.codecs.options import CodecOptions, Codecs
    from fusedrec_torchrec.codecs.threshold_options import ThresholdOptions
    from fusedrec_torchrec.compat.momentum_scale import MomentumScaledRowWiseAdagrad
    from fusedrec_torchrec.core.lost_rank import LostRankError
    from fusedrec_torchrec.exchange.options import ExchangeOptions
    from fusedrec_torchrec.grid.model_parallel import GridModelParallel
    from fusedrec_torchrec.hot.cost import CostOptions
    from fusedrec_torchrec.hot.options import AdaptOptions, HotOptions, HotRule
    from fusedrec_torchrec.hot.rows import reconcile
    from fusedrec_torchrec.planner.batch_profile import profile_batches
    from fusedrec_torchrec.planner.planner import FusedShardingPlanner
    from fusedrec_torchrec.sharding.grid_options import GridOptions
    from fusedrec_torchrec.sharding.plan_entries import (
        GridShardingPlan,
        fused_column_wise,
        fused_row_wise,
        fused_table_wise,
    )
    from fusedrec_torchrec.sharding.sharders import (
        FusedEmbeddingBagCollectionSharder,
        FusedEmbeddingCollectionSharder,
        FusedFeatureProcessedEmbeddingBagCollectionSharder,
        fused_sharders,
    )
    from fusedrec_torchrec.sharding.sharding_type import FusedShardingType
    from fusedrec_torchrec.sharding.train_pipeline import FusedTrainPipeline
else:  # out of sight of type checkers, which would take every name for a public one

    def __getattr__(name: str) -> object:
        """Imports a public name when it is used for the first time."""
        if name not in _DEFINED_IN:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        value = getattr(import_module(f"{__name__}.{_DEFINED_IN[name]}"), name)
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    """Lists public names before they are imported, too."""
    return sorted({*globals(), *__all__})
