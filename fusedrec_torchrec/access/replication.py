"""When a replica of a row pays: what everybody who picks hot rows reckons with.

P2RES (PPoPP 2024) asks which rows to replicate.  The answer here: rows in the order in which they
are likely to be in a batch (``likeliest_first``), as many of them as make the step shortest.  It is
asked twice, before a training by the rule ``cost_model`` of hot rows (``hot.cost``) and by the
planner (``planner.search.replicate``).  The price is one, too, ``step_seconds``:

    other + needed (n L + E / a) + (1 - hidden) / k (l + S / b)

E are the bytes of the exchange, in n all-to-alls.  S are those of a sync every k steps: of the rows
that k batches touch, at the speed of an all-to-all, or of all replicas, at that of an all-reduce,
whichever are fewer.  The rule has E and S from a profile and speeds from a few settings.  The
planner has them from its stages and a cluster, which also know of work other than communication.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

__all__ = [
    "Line",
    "Links",
    "Sync",
    "chance_in_batch",
    "cheapest",
    "likeliest_first",
    "step_seconds",
    "sync_bytes",
    "sync_of",
]

Floats = NDArray[np.float64]
Bytes = TypeVar("Bytes", float, Floats)


@dataclass(frozen=True)
class Line:
    """Says how long a collective takes.

    Attributes:
        latency: seconds without any data.
        per_byte: seconds for each byte that a rank sends.
    """

    latency: float
    per_byte: float

    def seconds(self, sent: Bytes, collectives: int = 1) -> Bytes:
        """Returns the seconds of so many collectives that send these bytes together."""
        return collectives * self.latency + self.per_byte * sent


@dataclass(frozen=True)
class Links:
    """Says how fast ranks reach each other.

    Attributes:
        all_to_all: of the exchange, and of a sync that sends touched rows to every other rank.
        all_reduce: of a sync that sums up all replicas.
        hidden: share of a sync's time that runs beside other work.
    """

    all_to_all: Line
    all_reduce: Line
    hidden: float


@dataclass(frozen=True)
class Sync:
    """A sync of replicas, or one for each of several numbers of them.

    Attributes:
        sent: bytes that a rank sends.
        is_sparse: whether they are gradients of touched rows, not of all replicas.
        every: steps from one sync to the next.
    """

    sent: Floats
    is_sparse: NDArray[np.bool_]
    every: int


def chance_in_batch(shares: Floats, ids: float | Floats) -> Floats:
    """Returns the probability that a row is in a batch, 1 - (1 - p)^n.

    Args:
        shares: p, the share of the table's accesses that each row gets.
        ids: n, how many ids of the table the batch has.
    """
    return np.asarray(-np.expm1(ids * np.log1p(-np.clip(shares, 0.0, 1.0 - 1e-15))))


def likeliest_first(
    chances_R: Floats, tables_R: NDArray[np.int64], ids_R: NDArray[np.int64]
) -> NDArray[np.int64]:
    """Returns the order in which rows are replicated: those in most batches first.

    Of equally likely rows those of the first table come first, and of these the lowest ids.

    Args:
        chances_R: probability of each row to be in a batch.
        tables_R: number of its table.
        ids_R: its id.
    """
    return np.asarray(np.lexsort((ids_R, tables_R, -chances_R)))


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


def sync_of(
    touched: Callable[[int], float | Floats],
    replicated: float | Floats,
    ranks: int,
    every: int,
) -> Sync:
    """Returns the sync of replicas, in the way that sends fewer bytes, as training does it.

    Args:
        touched: bytes of gradients of the replicated rows that a rank touches in so many batches.
        replicated: bytes of gradients of all replicated rows.
        ranks: that have a replica.
        every: steps from one sync to the next.
    """
    sparse, dense = sync_bytes(np.asarray(touched(every)), np.asarray(replicated), ranks)
    return Sync(np.minimum(sparse, dense), np.asarray(sparse <= dense), every)


def step_seconds(
    exchange: float | Floats,
    collectives: int,
    sync: Sync | None,
    links: Links,
    needed: float | Floats = 1.0,
    other: float | Floats = 0.0,
) -> Floats:
    """Returns the seconds of a step, or of several that differ in the number of replicas.

    Args:
        exchange: bytes that the busiest rank sends in the exchange of rows that have no replica.
        collectives: all-to-alls of the exchange.
        sync: of the replicas; None if there are none.
        links: between the ranks.
        needed: share of the steps that need the exchange.
        other: seconds of everything else.
    """
    seconds = other + needed * links.all_to_all.seconds(np.asarray(exchange), collectives)
    if sync is None:
        return np.asarray(seconds)
    ways = links.all_to_all.seconds(sync.sent), links.all_reduce.seconds(sync.sent)
    whole = np.where(sync.sent > 0, np.where(sync.is_sparse, *ways), 0.0)
    return np.asarray(seconds + whole * (1 - links.hidden) / sync.every)


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
