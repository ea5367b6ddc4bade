"""A planner that extends TorchRec's, so that fused and stock tables are planned together."""

from fusedrec_torchrec.planner.planner import FusedShardingPlanner

__all__ = ["FusedShardingPlanner"]
