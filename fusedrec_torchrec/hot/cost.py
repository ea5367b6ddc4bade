"""When replication pays: the price of a step after dedup, from a few settings.

P2RES (PPoPP 2024) picks the rows to replicate by a performance model, but gives no formula.  This
is ours; ``access.replication`` has the formula, which is the planner's as well.  Once requests are
deduplicated, a row that every rank wants costs the same bytes through all-to-all as through a ring
all-reduce, so replication must pay in other ways; the model has a term for each:

- an all-reduce over all replicas may run on better links than the all-to-all
  (``all_reduce_bandwidth``), where it is fewer bytes than touched rows to every other rank;
- the sync is off the critical path: ``hidden`` of its time runs beside other work;
- replicas may be synced every k steps only, which saves as much as batches have rows in common;
- no owner is asked by all ranks for one row: an exchange ends with its most loaded rank;
- a batch of hot rows only needs no exchange at all.

Rows are replicated in the order in which they are likely to be in a batch, so the question is how
many.  The answer can be none.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from fusedrec_torchrec.access.replication import (
    Line,
    Links,
    chance_in_batch,
    cheapest,
    step_seconds,
    sync_of,
)
from fusedrec_torchrec.core.config import section

__all__ = ["CostOptions", "RowUse", "rows_to_replicate", "seconds_of_prefixes"]

ID_BYTES = 4
EXCHANGES = 3  # ids, rows, gradients


@section
class CostOptions:
    """Says what the cost model assumes of machine and training.

    Attributes:
        batch_size: samples of a batch of one rank.
        all_to_all_bandwidth: bytes per second that a rank sends in an all-to-all, also in a sync
            that sends touched rows to every other rank.
        all_reduce_bandwidth: bytes per second that a rank sends in an all-reduce; on several nodes
            a hierarchical one is faster than the all-to-all.
        latency: seconds that a collective takes without any data.
        hidden: share of the sync's time that runs beside other work.
    """

    batch_size: int = Field(default=2048, ge=1)
    all_to_all_bandwidth: float = Field(default=1e9, gt=0)
    all_reduce_bandwidth: float = Field(default=1e9, gt=0)
    latency: float = Field(default=1e-4, ge=0)
    hidden: float = Field(default=0.5, ge=0, le=1)

    @property
    def links(self) -> Links:
        """How fast ranks reach each other, in the terms of ``access.replication``."""
        return Links(
            Line(self.latency, 1 / self.all_to_all_bandwidth),
            Line(self.latency, 1 / self.all_reduce_bandwidth),
            self.hidden,
        )


@dataclass(frozen=True)
class RowUse:
    """Rows in the order in which they would be replicated, R of them.

    Attributes:
        uses_R: accesses of each row in a sample.
        bytes_R: of a row on the wire.
        owner_R: rank that owns the row.
        table_R: number of its table.
        uses_per_table: accesses of all rows of each table in a sample, those not listed included.
        rest_requests: rows not listed that a rank asks for in a batch.
        rest_bytes: of such a row on the wire.
    """

    uses_R: NDArray[np.float64]
    bytes_R: NDArray[np.int64]
    owner_R: NDArray[np.int64]
    table_R: NDArray[np.int64]
    uses_per_table: NDArray[np.float64]
    rest_requests: float
    rest_bytes: float


def seconds_of_prefixes(
    use: RowUse, ranks: int, options: CostOptions, sync_every: int, hot_batches: bool
) -> NDArray[np.float64]:
    """Returns the seconds of communication in a step if the first 0, 1, 2, ... rows are replicated.

    Args:
        use: the rows.
        ranks: that train.
        options: of the machine.
        sync_every: steps from one sync of replicas to the next.
        hot_batches: whether batches without other rows skip the exchange.
    """
    in_table_R = use.uses_per_table[use.table_R]
    shares_R = np.divide(
        use.uses_R, in_table_R, out=np.zeros(len(use.uses_R)), where=in_table_R > 0
    )
    ids_R = in_table_R * options.batch_size
    present_R = chance_in_batch(shares_R, ids_R)
    away = (ranks - 1) / ranks

    # Through the owners: fetch and gradient, and the id; the most loaded owner sets the pace.
    asked_R = present_R * (2 * use.bytes_R + ID_BYTES)
    load_RW = np.zeros((len(asked_R) + 1, ranks))
    load_RW[np.arange(len(asked_R)) + 1, use.owner_R] = asked_R * away
    rest = use.rest_requests * (2 * use.rest_bytes + ID_BYTES) * away / ranks
    left_RW = load_RW.sum(0) - load_RW.cumsum(0) + rest

    # Through the replicas.
    message_R = (use.bytes_R + ID_BYTES).astype(np.float64)

    def touched(batches: int) -> NDArray[np.float64]:
        return _before(chance_in_batch(shares_R, ids_R * batches) * message_R)

    sync = sync_of(touched, _before(message_R), ranks, sync_every)

    # Batches of hot rows only: the samples all of whose ids are hot, as if tables had nothing to
    # do with each other.  All ranks tell each other whether there is another row.
    needed, asking = np.ones(len(asked_R) + 1), 0.0
    if hot_batches:
        log_share = np.zeros(len(asked_R) + 1)
        for table, uses in enumerate(use.uses_per_table):
            if uses > 0:
                covered = _before(np.where(use.table_R == table, use.uses_R, 0)) / uses
                log_share += uses * np.log(np.clip(covered, 1e-12, 1))
        needed, asking = 1 - np.exp(log_share), options.latency
    return step_seconds(ranks * left_RW.max(1), EXCHANGES, sync, options.links, needed, asking)


def rows_to_replicate(
    use: RowUse, ranks: int, options: CostOptions, sync_every: int = 1, hot_batches: bool = False
) -> int:
    """Returns how many rows to replicate; the least number if several cost the same."""
    return cheapest(seconds_of_prefixes(use, ranks, options, sync_every, hot_batches).tolist())


def _before(values_R: NDArray[np.float64]) -> NDArray[np.float64]:
    """Returns the sums of the first 0, 1, 2, ... values."""
    return np.concatenate([[0.0], np.cumsum(values_R)])
