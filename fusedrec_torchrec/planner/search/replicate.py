"""Which rows are hot, at the prices of a cluster (P2RES's question; see ``access.replication``).

Replicating a row saves its way from and to its owner, as often as it is in a batch, and costs its
part of the sync.  Of all rows, those that are in a batch with the highest probability gain most for
a byte of memory, in all tables alike; so hot rows are those above a threshold of this probability,
and the planner tries thresholds.
"""

from collections.abc import Callable, Sequence
from functools import cache

import numpy as np
from numpy.typing import NDArray

from fusedrec_torchrec.access.replication import (
    chance_in_batch,
    cheapest,
    likeliest_first,
    step_seconds,
)
from fusedrec_torchrec.planner.cost.cluster import ClusterConfig
from fusedrec_torchrec.planner.cost.memory import HOT_INDEX_BYTES
from fusedrec_torchrec.planner.cost.step import Step
from fusedrec_torchrec.planner.cost.table_load import TableLoad

__all__ = ["Ranking", "most_used_by_class", "price", "rows_above_best_threshold", "thresholds"]

STEPS, FINER = 40, 16
RAREST = 1e-4
LEAST_SAVING = 1e-4  # share of the step that more hot rows must save


def thresholds(tables: Sequence[TableLoad], batch: int) -> NDArray[np.float64]:
    """Returns the probabilities to try, the highest first."""
    most = max(float(table.classes.met(table.ids(batch)).max()) for table in tables)
    high = np.geomspace(min(most, 0.5), RAREST, STEPS) if most > RAREST else np.empty(0)
    return np.concatenate([1 - np.geomspace(1e-4, 0.5, STEPS // 4), high])


def _finer(tried: NDArray[np.float64], best: float) -> NDArray[np.float64]:
    """Returns more thresholds, around the best one of those that were tried."""
    place = int(np.argmin(np.abs(tried - best)))
    high, low = tried[max(place - 1, 0)], tried[min(place + 1, len(tried) - 1)]
    return np.geomspace(high, low, FINER)


def most_used_by_class(
    tables: Sequence[TableLoad], batch: int, tried: NDArray[np.float64], budget: float
) -> list[NDArray[np.int64]]:
    """Returns how many rows of each table are in a batch with at least this probability.

    There is an answer for each threshold that is tried.  It is for tables whose rows are only known
    by their classes.  If the rows of all tables take more than ``budget`` bytes, none are hot.
    """
    rows_TH = np.zeros((len(tables), len(tried)), np.int64)
    for t, table in enumerate(tables):
        likely_HC = table.classes.met(table.ids(batch)) >= tried[:, None]
        rows_TH[t] = likely_HC @ table.classes.rows_C
    size_T = np.array([float(table.row_bytes + HOT_INDEX_BYTES) for table in tables])
    rows_TH[:, size_T @ rows_TH > budget] = 0
    return list(rows_TH.T)


class Ranking:
    """Orders the rows of tables that a profile knows, those in most batches first.

    Args:
        tables: whose rows may be hot; those without a profile have none.
        batch: samples of a rank.
    """

    def __init__(self, tables: Sequence[TableLoad], batch: int) -> None:
        self._names = [table.name for table in tables]
        tables_R, ids_R, chance_R, sizes_R = [], [], [], []
        for t, table in enumerate(tables):
            if table.places is None:
                continue
            rows = len(table.places.ids_R)
            tables_R.append(np.full(rows, t))
            ids_R.append(table.places.ids_R)
            chance_R.append(chance_in_batch(table.places.shares_R, table.ids(batch)))
            sizes_R.append(np.full(rows, float(table.row_bytes + HOT_INDEX_BYTES)))
        empty = [np.empty(0)]
        chances = np.concatenate(chance_R or empty)
        self._tables = np.concatenate(tables_R or empty).astype(np.int64)
        self._ids = np.concatenate(ids_R or empty).astype(np.int64)
        order = likeliest_first(chances, self._tables, self._ids)
        self._tables, self._ids = self._tables[order], self._ids[order]
        self._chances = chances[order]
        self._sizes = np.cumsum(np.concatenate(sizes_R or empty)[order])

    def __len__(self) -> int:
        return len(self._ids)

    def rows(self, threshold: float, budget: float) -> int:
        """Returns how many rows are in a batch with at least this probability, and fit."""
        likely = int(np.searchsorted(-self._chances, -threshold, side="right"))
        return min(likely, int(np.searchsorted(self._sizes, budget, side="right")))

    def counts(self, rows: int) -> dict[str, int]:
        """Returns how many of the first rows are of each table."""
        numbers = np.bincount(self._tables[:rows], minlength=len(self._names))
        return dict(zip(self._names, numbers.tolist(), strict=True))

    def ids(self, rows: int) -> dict[str, NDArray[np.int64]]:
        """Returns the ids of the first rows by table, without tables that have none of them."""
        order = np.lexsort((self._ids[:rows], self._tables[:rows]))
        numbers = self.counts(rows)
        pieces = np.split(self._ids[:rows][order], np.cumsum(list(numbers.values()))[:-1])
        by_name = dict(zip(self._names, pieces, strict=True))
        return {name: ids for name, ids in by_name.items() if len(ids)}


def price(step: Step, cluster: ClusterConfig) -> float:
    """Returns the seconds of a fused step of one group, as replication is decided by."""
    exchange = [stage for stage in step.stages if stage.is_collective and not stage.can_hide]
    work = [
        seconds
        for stage, seconds in zip(step.stages, step.seconds_of_stages(cluster), strict=True)
        if not stage.is_collective
    ]
    return float(
        step_seconds(
            exchange=sum(float(stage.amount_W.max()) for stage in exchange),
            collectives=len(exchange),
            sync=step.sync,
            links=cluster.links(step.ranks),
            other=step.overhead(cluster) + sum(work),
        )
    )


def rows_above_best_threshold(
    ranking: Ranking,
    tried: NDArray[np.float64],
    budget: float,
    step: Callable[[int], Step],
    cluster: ClusterConfig,
) -> int:
    """Returns how many of the ranked rows to replicate so that the step is shortest.

    Args:
        ranking: the rows.
        tried: thresholds of the probability to be in a batch; more are tried around the best one.
        budget: bytes for the replicas.
        step: with so many hot rows.
        cluster: to plan for.
    """

    @cache
    def seconds(rows: int) -> float:
        return price(step(rows), cluster)

    rows = [0, *(ranking.rows(threshold, budget) for threshold in tried)]
    best = cheapest(map(seconds, rows), LEAST_SAVING)
    if not best:
        return 0
    near = _finer(tried, tried[best - 1])
    rows = [rows[best], *(ranking.rows(threshold, budget) for threshold in near)]
    return rows[cheapest(map(seconds, rows), LEAST_SAVING)]
