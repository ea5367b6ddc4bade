"""Sums up a benchmark for programs: what its tables show, in milliseconds and bytes."""

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from fusedrec_torchrec.bench.figures import WorkloadFigures
from fusedrec_torchrec.bench.statistics import Ratio

__all__ = ["summary_of"]


def summary_of(document: dict[str, Any], workloads: Sequence[WorkloadFigures]) -> dict[str, Any]:
    """Returns the figures of all workloads, and what was left out or failed."""
    return {
        "machine": document["machine"],
        "workloads": [_workload(workload) for workload in workloads],
        "left_out": document["left_out"],
        "failed": document.get("failed", {}),
    }


def _workload(w: WorkloadFigures) -> dict[str, Any]:
    return {
        "name": w.title,
        "allocator": w.allocator,
        "ranks": w.config.ranks,
        "batch_size": w.config.batch_size,
        "systems": {
            name: {
                "step_ms": system.milliseconds,
                "time_over_fused": _ratio(system.against_fused),
                "collectives": system.collectives,
                "bytes_sent": system.bytes_sent,
                "peak_memory": system.memory,
            }
            for name, system in w.systems.items()
        },
        "best_stock": None if w.best_stock is None else w.best_stock.name,
        "speed_up": _ratio(w.speed_up),
        "advice": w.advice or None,
        "stage_ms": w.phases,
        "left_out": w.measured["left_out"],
    }


def _ratio(ratio: Ratio | None) -> dict[str, float] | None:
    return None if ratio is None else asdict(ratio)
