"""Writes what the planner decided as a plan file for training."""

from dataclasses import asdict
from pathlib import Path
from typing import Any

from fusedrec_torchrec.planner.cost.cluster import MB
from fusedrec_torchrec.planner.model_tables import grid_options, plan_of
from fusedrec_torchrec.planner.planning import Planning
from fusedrec_torchrec.planner.search.decision import Decision
from fusedrec_torchrec.sharding.plan_conversion import plan_file_of
from fusedrec_torchrec.sharding.plan_file import write_plan

__all__ = ["write_decision"]


def write_decision(path: Path, planning: Planning, decision: Decision) -> None:
    """Writes the plan file, and a file of hot rows beside it if there are any."""
    plan = plan_of(decision, planning.model, planning.sharders)
    groups, grid = decision.groups, grid_options(decision)
    settings: dict[str, Any] = {
        "input_dist": "exact_counts" if decision.exact_counts else "single_shot",
        "hot_sync_every": decision.hot_every,
        "codecs": None if decision.codecs.are_exact else asdict(decision.codecs),
        "grid": None if grid is None else asdict(grid),
        "expected": {
            "step_ms": round(1e3 * decision.seconds, 4),
            "mb_sent_by_a_rank": round(decision.bytes_sent / decision.ranks / MB, 4),
            "memory_gb": round(float(decision.memory_W.max()) / 1e9, 4),
        },
    }
    local = min(groups.local or decision.cluster.local_ranks, groups.size)
    file, hot_set = plan_file_of(plan, decision.ranks, local, decision.cluster.device, settings)
    write_plan(path, file, hot_set)
