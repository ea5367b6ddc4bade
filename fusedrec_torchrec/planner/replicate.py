"""Which rows are hot: P2RES's question, asked of the cost model.

Replicating a row saves its way from and to its owner, as often as it is in a batch, and costs its
part of the sync.  Of all rows, those that are in a batch with the highest probability gain most for
a byte of memory, in all tables alike; so hot rows are those above a threshold of this probability,
and the planner tries thresholds.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from fusedrec_torchrec.planner.memory import HOT_INDEX_BYTES
from fusedrec_torchrec.planner.table_load import TableLoad

__all__ = ["finer", "most_used", "most_used_by_class", "thresholds"]

STEPS, FINER = 40, 16
RAREST = 1e-4


def thresholds(tables: Sequence[TableLoad], batch: int) -> NDArray[np.float64]:
    """Probabilities to try, the highest first."""
    most = max(float(table.classes.met(table.ids(batch)).max()) for table in tables)
    high = np.geomspace(min(most, 0.5), RAREST, STEPS) if most > RAREST else np.empty(0)
    return np.concatenate([1 - np.geomspace(1e-4, 0.5, STEPS // 4), high])


def finer(tried: NDArray[np.float64], best: float) -> NDArray[np.float64]:
    """More thresholds, around the best one so far."""
    place = int(np.argmin(np.abs(tried - best)))
    high, low = tried[max(place - 1, 0)], tried[min(place + 1, len(tried) - 1)]
    return np.geomspace(high, low, FINER)


def most_used_by_class(
    tables: Sequence[TableLoad], batch: int, threshold: float, budget: float
) -> NDArray[np.int64]:
    """How many rows of each table are in a batch with at least this probability, and fit.

    Of tables whose rows are only known by their classes.
    """
    rows_T = np.zeros(len(tables), np.int64)
    for t, table in enumerate(tables):
        likely = table.classes.met(table.ids(batch)) >= threshold
        rows_T[t] = int(table.classes.rows_C[likely].sum())
    size_T = np.array([float(table.row_bytes + HOT_INDEX_BYTES) for table in tables])
    total = float(rows_T @ size_T)
    return rows_T if total <= budget else np.zeros_like(rows_T)


def most_used(
    tables: Sequence[TableLoad], batch: int, threshold: float, budget: float
) -> dict[str, NDArray[np.int64]]:
    """Rows that are in a batch with at least this probability, as many as fit.

    Args:
        tables: whose rows may be hot; those without a profile have none.
        batch: samples of a rank.
        threshold: the least probability.
        budget: bytes.
    """
    names, ids, met, sizes = [], [], [], []
    for t, table in enumerate(tables):
        if table.places is None:
            continue
        probability = -np.expm1(
            table.ids(batch) * np.log1p(-np.clip(table.places.shares_R, 0, 1 - 1e-15))
        )
        chosen = np.flatnonzero(probability >= threshold)
        names.append(np.full(len(chosen), t))
        ids.append(table.places.ids_R[chosen])
        met.append(probability[chosen])
        sizes.append(np.full(len(chosen), float(table.row_bytes + HOT_INDEX_BYTES)))
    if not names or not sum(map(len, ids)):
        return {}
    table_R, id_R, met_R, size_R = map(np.concatenate, (names, ids, met, sizes))
    order = np.lexsort((id_R, table_R, -met_R))
    fits = int(np.searchsorted(np.cumsum(size_R[order]), budget, side="right"))
    taken = order[:fits]
    return {
        tables[t].name: np.sort(id_R[taken[table_R[taken] == t]])
        for t in np.unique(table_R[taken]).tolist()
    }
