"""Which rows a rank owns: ranges of equal load instead of equal length."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from fusedrec_torchrec.planner.cost.stages import HotUse
from fusedrec_torchrec.planner.cost.table_load import TableLoad

__all__ = ["balanced_ranges"]


def balanced_ranges(
    tables: Sequence[TableLoad],
    batch: int,
    ranks: int,
    hot: HotUse | None = None,
    evenness: float = 0.0,
    load_W: NDArray[np.float64] | None = None,
) -> list[NDArray[np.int64]]:
    """Returns ranges of all tables so that every rank is asked for as many bytes as the others.

    Tables with little load come first: they cannot be divided as one likes, and the large ones make
    up for it.  Where popular rows are is known from the table's profile.

    Args:
        tables: of the fused exchange.
        batch: samples of a rank.
        ranks: that own rows.
        hot: rows that are not asked of their owners.
        evenness: 0 balances load, 1 makes ranges of equal length, which balances memory.
        load_W: rows times columns that ranks are asked for anyway, of tables that are not split by
            rows.
    """
    hot_T = np.zeros(len(tables), np.int64) if hot is None else hot.rows_T
    weight_T = np.array(
        [t.unique(batch, int(h)) * t.dim for t, h in zip(tables, hot_T, strict=True)]
    )
    load_W = np.zeros(ranks) if load_W is None else load_W.astype(np.float64)
    ranges: list[NDArray[np.int64]] = [np.empty(0, np.int64)] * len(tables)
    for t in np.argsort(weight_T, kind="stable"):
        table, weight = tables[t], weight_T[t]
        lacking_W = np.maximum((load_W.sum() + weight) / ranks - load_W, 0.0)
        total = lacking_W.sum()
        wanted_W = lacking_W / total if total > 0 else np.full(ranks, 1 / ranks)
        inner = np.cumsum(wanted_W)[:-1]
        ids = np.empty(0, np.int64) if hot is None else hot.of(int(t))
        edges = _edges(table, batch, inner, ids)
        even = np.arange(1, ranks) * table.rows / ranks
        edges = np.rint((1 - evenness) * edges + evenness * even).astype(np.int64)
        ranges[t] = np.concatenate([[0], np.maximum.accumulate(edges), [table.rows]])
        load_W += weight * table.share(ranges[t], batch, ids)
    return ranges


def _edges(
    table: TableLoad, batch: int, inner: NDArray[np.float64], hot: NDArray[np.int64]
) -> NDArray[np.float64]:
    """Returns the rows at which the given shares of the load are before."""
    if table.places is None:
        return np.asarray(inner * table.rows)
    places = table.places.without(hot) if len(hot) else table.places
    ids = table.ids(batch)
    total = float(places.before(np.array([table.rows]), ids)[0])
    return places.edges(inner * total, ids).astype(np.float64)
