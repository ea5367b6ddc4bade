"""Counts how evenly owners of rows are asked, and how many requests hot rows spare them."""

from typing import Any

import numpy as np

from fusedrec_torchrec.access.hot_set import HotSet
from fusedrec_torchrec.bench.workload import Workload

__all__ = ["HIT_SIZES", "owner_requests"]

HIT_SIZES = (100, 300, 1000, 3000, 10_000, 20_000, 30_000, 100_000, 300_000)


def owner_requests(workload: Workload) -> dict[str, Any]:
    """Counts what this rank's batches ask of each owner, with TorchRec's even row ranges.

    ``row_wise`` asks for every id, ``fused_row_wise`` for every row of a batch once, and
    ``fused_hot`` for those of them that are not hot.  ``hits`` has, for hot sets of several sizes,
    the rows of the batches that are hot, each once in a batch, and the ids.
    """
    assert workload.hot is not None
    ranks = workload.config.ranks
    asked = {name: np.zeros(ranks, int) for name in ("row_wise", "fused_row_wise", "fused_hot")}
    hot_set = workload.hot.hot_set()
    sizes = {size: HotSet.most_used(workload.hot.profile, size) for size in HIT_SIZES}
    hits = {size: np.zeros(2, int) for size in HIT_SIZES}
    totals = np.zeros(2, int)
    for batch in workload.batches:
        for name, rows in workload.table_rows.items():
            ids = batch[name].values().numpy()
            unique = np.unique(ids)
            cold = unique[~np.isin(unique, hot_set.ids[name])]
            block = max(-(-rows // ranks), 1)
            for system, wanted in zip(asked, (ids, unique, cold), strict=True):
                asked[system] += np.bincount(wanted // block, minlength=ranks)
            totals += (len(unique), len(ids))
            for size, other in sizes.items():
                hits[size] += (
                    int(np.isin(unique, other.ids[name]).sum()),
                    int(np.isin(ids, other.ids[name]).sum()),
                )
    return {
        **{system: counts.tolist() for system, counts in asked.items()},
        "hits": {str(size): counts.tolist() for size, counts in hits.items()},
        "totals": totals.tolist(),
    }
