"""Checks rules for hot rows against what is known of the tables, without torch."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from fusedrec_torchrec.hot.options import HotOptions, HotRule

__all__ = ["check_counts", "checked_ids"]


def check_counts(rule: HotRule, options: HotOptions, where: str) -> None:
    """Refuses rules that nobody gives the counts for.

    Raises:
        ValueError: the rule goes by how often rows are used, which nobody tells.
    """
    if options.profile is not None or (options.adapt is not None and not rule.cost_model):
        return
    name = next(n for n in ("top_k", "memory", "cost_model") if getattr(rule, n))
    raise ValueError(
        f"{where}: {name} needs hot.profile, the counts to go by (fusedrec profile --save)"
        + ("" if rule.cost_model else ", or hot.adapt, to find out in training")
    )


def checked_ids(ids: Sequence[int], rows: int, where: str) -> NDArray[np.int64]:
    """Returns hot rows of a table in ascending order.

    Raises:
        ValueError: the table has no such row, or one is there more than once.
    """
    array = np.asarray(ids)
    if array.size == 0:
        return np.empty(0, np.int64)
    if array.ndim != 1 or array.dtype.kind not in "iu":
        raise ValueError(f"{where}: ids must be a list of whole numbers")
    bad = array[(array < 0) | (array >= rows)]
    if len(bad):
        raise ValueError(f"{where}: id {bad[0]} is out of range [0, {rows})")
    sorted_ids, counts = np.unique(array.astype(np.int64), return_counts=True)
    if (counts > 1).any():
        raise ValueError(f"{where}: id {sorted_ids[counts > 1][0]} is there more than once")
    return sorted_ids
