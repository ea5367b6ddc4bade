"""Fused, deduplicated embedding sharding as a plugin for TorchRec."""

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
from fusedrec_torchrec.planner.planner import FusedShardingPlanner
from fusedrec_torchrec.sharding.grid_options import GridOptions
from fusedrec_torchrec.sharding.plan_entries import GridShardingPlan, fused_row_wise
from fusedrec_torchrec.sharding.sharders import (
    FusedEmbeddingBagCollectionSharder,
    FusedEmbeddingCollectionSharder,
    FusedFeatureProcessedEmbeddingBagCollectionSharder,
    fused_sharders,
)
from fusedrec_torchrec.sharding.sharding_type import FusedShardingType

__all__ = [
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
    "fused_row_wise",
    "fused_sharders",
    "load_checkpoint",
    "reconcile",
    "save_checkpoint",
]
