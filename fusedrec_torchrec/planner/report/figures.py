"""A decision for programs: what is chosen, what else it would have cost, where the time goes."""

from typing import Any

from fusedrec_torchrec.planner.report.explain import COLUMNS, Explanation

__all__ = ["figures_of"]


def figures_of(explanation: Explanation) -> dict[str, Any]:
    """Returns all that ``print_explanation`` shows, in bytes and milliseconds."""
    decision, cluster = explanation.decision, explanation.decision.cluster
    return {
        "cluster": cluster.name,
        "ranks": cluster.ranks,
        "samples_per_rank": decision.batch,
        "step_ms": _ms(decision.seconds),
        "tables": [_table(explanation, t) for t in range(len(decision.tables))],
        "plans": [
            {
                "name": name,
                "step_ms": _ms(plan.seconds),
                "bytes_sent_per_rank": plan.bytes_sent / plan.ranks,
                "memory_of_the_fullest_rank": float(plan.memory_W.max()),
            }
            for name, plan in explanation.alternatives.items()
        ],
        "overhead_ms": _ms(explanation.overhead()),
        "stages": [
            {
                "sharding": step.system,
                "stage": stage.name,
                "ms": _ms(seconds),
                "bytes_sent_per_rank": stage.bytes_sent / len(stage.amount_W)
                if stage.is_collective
                else None,
            }
            for step, stage, seconds in explanation.stages()
        ],
        "busy_ms_by_rank": [_ms(float(seconds)) for seconds in explanation.busy_W()],
        "memory_by_rank": [float(size) for size in decision.memory_W],
        "codecs": explanation.codecs(),
        "limit": explanation.limit(),
        "advice": [{"what": hint.what, "saves": hint.saves} for hint in explanation.advice()],
    }


def _table(explanation: Explanation, t: int) -> dict[str, Any]:
    decision, table = explanation.decision, explanation.decision.tables[t]
    return {
        "name": table.name,
        "rows": table.rows,
        "columns": table.dim,
        "sharding": decision.systems[t],
        "owners": list(decision.owners[t]),
        "on_host": bool(decision.on_host[t]),
        "hot_rows": len(decision.hot.get(table.name, ())),
        "ids": table.ids(decision.batch),
        "distinct_rows": table.unique(decision.batch),
        "distinct_bags": table.distinct_bags(decision.batch).bags if table.pooled else None,
        "ms_by_sharding": {system: _ms(explanation.price(t, system)) for system in COLUMNS},
        "why": explanation.why(t),
    }


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else 1e3 * float(seconds)
