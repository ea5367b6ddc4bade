"""Which rows are hot: P2RES's question, asked of the cost model.

Replicating a row saves its way from and to its owner, as often as it is in a batch, and costs its
part of the sync.  Of all rows, those that are in a batch with the highest probability gain most for
a byte of memory, in all tables alike; so hot rows are those above a threshold of this probability,
and the planner tries thresholds.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from fusedrec_torchrec.planner.cost.memory import HOT_INDEX_BYTES
from fusedrec_torchrec.planner.cost.table_load import TableLoad

__all__ = ["Ranking", "finer", "most_used_by_class", "thresholds"]

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


class Ranking:
    """Rows of tables that a profile knows, the ones that are in most batches first.

    Args:
        tables: whose rows may be hot; those without a profile have none.
        batch: samples of a rank.
    """

    def __init__(self, tables: Sequence[TableLoad], batch: int) -> None:
        self._names = [table.name for table in tables]
        known = [(t, table) for t, table in enumerate(tables) if table.places is not None]
        tables_R, ids_R, met_R, sizes_R = [], [], [], []
        for t, table in known:
            assert table.places is not None
            shares = np.clip(table.places.shares_R, 0, 1 - 1e-15)
            tables_R.append(np.full(len(shares), t))
            ids_R.append(table.places.ids_R)
            met_R.append(-np.expm1(table.ids(batch) * np.log1p(-shares)))
            sizes_R.append(np.full(len(shares), float(table.row_bytes + HOT_INDEX_BYTES)))
        empty = [np.empty(0)]
        met = np.concatenate(met_R or empty)
        self._tables = np.concatenate(tables_R or empty).astype(np.int64)
        self._ids = np.concatenate(ids_R or empty).astype(np.int64)
        order = np.lexsort((self._ids, self._tables, -met))
        self._tables, self._ids = self._tables[order], self._ids[order]
        self._met = met[order]
        self._sizes = np.cumsum(np.concatenate(sizes_R or empty)[order])

    def __len__(self) -> int:
        return len(self._ids)

    def rows(self, threshold: float, budget: float) -> int:
        """How many rows are in a batch with at least this probability, and fit."""
        likely = int(np.searchsorted(-self._met, -threshold, side="right"))
        return min(likely, int(np.searchsorted(self._sizes, budget, side="right")))

    def counts(self, rows: int) -> dict[str, int]:
        """Of the first rows, how many are of each table."""
        numbers = np.bincount(self._tables[:rows], minlength=len(self._names))
        return dict(zip(self._names, numbers.tolist(), strict=True))

    def ids(self, rows: int) -> dict[str, NDArray[np.int64]]:
        """Of the first rows, which are of each table."""
        order = np.lexsort((self._ids[:rows], self._tables[:rows]))
        numbers = self.counts(rows)
        pieces = np.split(self._ids[:rows][order], np.cumsum(list(numbers.values()))[:-1])
        found = dict(zip(self._names, pieces, strict=True))
        return {name: ids for name, ids in found.items() if len(ids)}
