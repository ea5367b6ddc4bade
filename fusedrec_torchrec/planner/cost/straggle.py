"""How much busier the busiest owner is than the others, from sampled batches.

The cost model's amounts are means.  In a batch, some owner is asked for more: popular rows are
somewhere, and the luck of the draw adds to it.  A step waits for that owner.  Popular rows are
drawn one by one, each with an owner that it keeps; all others by their number on each owner.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from fusedrec_torchrec.access.replication import chance_in_batch
from fusedrec_torchrec.planner.cost.table_load import TableLoad

__all__ = ["busiest_owner"]

ALONE = 4096  # rows of a table that are drawn one by one


def busiest_owner(
    tables: Sequence[TableLoad],
    batch: int,
    ranks: int,
    dedup: bool,
    hot_T: NDArray[np.int64] | None = None,
    batches: int = 8,
    seed: int = 0,
) -> float:
    """Returns the load of the busiest owner, as a multiple of the mean; the mean over batches.

    Args:
        tables: whose rows are spread over the ranks, popular ones anywhere.
        batch: samples of a rank.
        ranks: that ask, and own.
        dedup: whether a rank asks for a row once in a batch, or as often as the batch has it.
        hot_T: rows of each table that are not asked for.
        batches: to sample.
        seed: of the sample.
    """
    if ranks < 2:
        return 1.0
    random = np.random.default_rng(seed)
    load_SW = np.zeros((batches, ranks))
    kinds: dict[tuple[object, ...], list[int]] = {}
    for t, table in enumerate(tables):
        cold = 0 if hot_T is None else int(hot_T[t])
        kinds.setdefault((table.classes, table.ids(batch), table.dim, cold), []).append(t)
    for (_, ids, dim, hot), same in kinds.items():
        table = tables[same[0]]
        assert isinstance(ids, float) and isinstance(dim, int) and isinstance(hot, int)
        classes = table.classes.without(hot) if hot else table.classes
        alone = min(int(classes.rows), max(ALONE // len(same), 64))
        shares = _first(classes.rows_C, classes.shares_C, alone)
        rest = classes.without(alone)
        for _ in same:
            owner_R = random.integers(0, ranks, alone)
            # Rows that are drawn one by one, in each batch by so many ranks or so often.
            if dedup:
                asked_SR = random.binomial(ranks, chance_in_batch(shares, ids), (batches, alone))
                others = ranks * rest.unique(ids)
            else:
                asked_SR = random.poisson(ranks * ids * shares, (batches, alone))
                others = ranks * ids * float((rest.rows_C * rest.shares_C).sum())
            for s in range(batches):
                load_SW[s] += dim * np.bincount(owner_R, asked_SR[s], minlength=ranks)
            load_SW += dim * random.poisson(others / ranks, (batches, ranks))
    mean = load_SW.mean(1)
    return float((load_SW.max(1) / np.maximum(mean, 1e-30)).mean()) if mean.any() else 1.0


def _first(
    rows_C: NDArray[np.float64], shares_C: NDArray[np.float64], count: int
) -> NDArray[np.float64]:
    """Returns the shares of the most used rows, one by one."""
    ends = np.cumsum(rows_C)
    return np.asarray(shares_C[np.searchsorted(ends, np.arange(count) + 0.5)])
