"""Fused, deduplicated embedding sharding as a plugin for TorchRec."""

from fusedrec_torchrec.checkpoint import LoadReport, SaveError, load_checkpoint, save_checkpoint
from fusedrec_torchrec.compression.gradients import ThresholdedDataParallel
from fusedrec_torchrec.compression.options import ThresholdOptions
from fusedrec_torchrec.exchange.codecs import CodecOptions, Codecs
from fusedrec_torchrec.exchange.options import ExchangeOptions
from fusedrec_torchrec.grid import GridModelParallel, GridOptions
from fusedrec_torchrec.hot.cost import CostOptions
from fusedrec_torchrec.hot.options import AdaptOptions, HotOptions, HotRule
from fusedrec_torchrec.hot.rows import reconcile
from fusedrec_torchrec.lost_rank import LostRankError
from fusedrec_torchrec.momentum_scale import MomentumScaledRowWiseAdagrad
from fusedrec_torchrec.planner import FusedShardingPlanner
from fusedrec_torchrec.sharders import (
    FusedEmbeddingBagCollectionSharder,
    FusedEmbeddingCollectionSharder,
    FusedFeatureProcessedEmbeddingBagCollectionSharder,
    fused_sharders,
)
from fusedrec_torchrec.sharding_plan import GridShardingPlan, fused_row_wise
from fusedrec_torchrec.sharding_type import FusedShardingType

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
