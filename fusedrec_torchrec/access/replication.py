"""When a replica of a row pays: what everybody who picks hot rows reckons with.

P2RES (PPoPP 2024) asks which rows to replicate.  The answer here: rows in the order in which they
are likely to be in a batch, as many of them as make the step shortest.  It is asked twice, before a
training by the rule ``cost_model`` of hot rows (``hot.cost``) and by the planner
(``planner.search.replicate``).  Both take the likelihood of a row, the bytes of a sync and the
choice among steps from here.  They differ in the price of a step, which the rule knows from a few
settings and the planner from a cluster, stage by stage.  So the rule is simpler in two places: with
a sync every k steps it reckons with the rows that one batch touches, the planner with those of k
batches; and it has every sync run at the speed of an all-reduce, where the planner has gradients of
touched rows run at that of an all-to-all.
"""

from collections.abc import Iterable
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

__all__ = ["chance_in_batch", "cheapest", "sync_bytes"]

Floats = NDArray[np.float64]
Bytes = TypeVar("Bytes", float, Floats)


def chance_in_batch(shares: Floats, ids: float | Floats) -> Floats:
    """Returns the probability that a row is in a batch, 1 - (1 - p)^n.

    Args:
        shares: p, the share of the table's accesses that each row gets.
        ids: n, how many ids of the table the batch has.
    """
    return np.asarray(-np.expm1(ids * np.log1p(-np.clip(shares, 0.0, 1.0 - 1e-15))))


def sync_bytes(touched: Bytes, replicated: Bytes, ranks: int) -> tuple[Bytes, Bytes]:
    """Returns the bytes that a rank sends to sync replicas, in each of two ways.

    The first sends the gradients of touched rows to all other ranks, the second sums up those of
    all replicated rows in a ring all-reduce.

    Args:
        touched: bytes of gradients of the rows that a rank has touched since the last sync.
        replicated: bytes of gradients of all replicated rows.
        ranks: that have a replica.
    """
    return (ranks - 1) * touched, 2 * (ranks - 1) / ranks * replicated


def cheapest(seconds: Iterable[float], saving: float = 0.0) -> int:
    """Returns which of the given steps is the shortest, the first of those that take as long.

    Args:
        seconds: of steps, at least one; those that need more replicas come later.
        saving: share of the time by which a step must be shorter than the best one before it.
    """
    best, least = 0, float("inf")
    for place, value in enumerate(seconds):
        if value < least * (1 - saving):
            best, least = place, value
    return best
