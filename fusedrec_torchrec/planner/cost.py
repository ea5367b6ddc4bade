"""What a training step costs, formula by formula: bytes of each collective, work of each stage.

A step is a list of parts, each with a number for every rank: bytes that the rank sends in a
collective, or bytes and ids that it works on.  Bytes are countable, and benchmarks count them.
Seconds come from a cluster's rates, and a part takes as long as it takes the busiest rank.

Letters: W ranks; T tables; B samples of a rank's batch; n ids of a table in it, B times its
pooling; U distinct rows among them, the sum over rows of 1 - (1 - p)^n; D columns; 4 bytes a
number.

==================  ==============================================================================
fused_row_wise
------------------  ------------------------------------------------------------------------------
dedup               n ids are made keys, unique, and bags of rows
ids                 W - 1 messages of header and capacity: the most rows asked of one owner, with
                    slack; 4 bytes each.  With exact counts: the headers, then U (W - 1) / W ids
lookup              an owner reads the rows asked for by W ranks
rows                an owner sends what W - 1 others asked for, D numbers each
pooling             n rows are read and pooled
pooling_backward    gradients of the outputs are summed for each of the U rows
gradients           the rows' way back
update              an owner applies what W ranks sent
table_wise          ids (8 bytes) and lengths (4) go to the table's rank, pooled rows (D) come back
                    for every bag, their gradients go; lookup and update of n ids, not of U
row_wise            ids to the row's rank, lengths to all; partial sums of every bag from all ranks
                    in a reduce-scatter, gradients to all in an all-gather
column_wise         ids and lengths to all ranks, D / W columns of every bag from each
==================  ==============================================================================
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from fusedrec_torchrec.exchange.input_dist import COUNTS, GRANULE
from fusedrec_torchrec.planner.access import RowClasses
from fusedrec_torchrec.planner.cluster import GB, ClusterConfig, RatesConfig
from fusedrec_torchrec.sharding_type import FUSED

__all__ = ["Part", "Step", "TableLoad", "fused_step", "stock_step"]

COLLECTIVES = ("all_to_all", "all_reduce", "all_gather", "reduce_scatter")
NUMBER_BYTES = 4
STOCK_ID_BYTES, LENGTH_BYTES = 8, 4
STOCK_SPLIT_BYTES = 24  # of TorchRec's first all-to-all, to each other rank
Floats = NDArray[np.float64]


@dataclass(frozen=True)
class TableLoad:
    """What a model asks of a table.

    Attributes:
        name: of the table.
        rows, dim: of the table.
        pooling: ids of a sample, of all features of the table together.
        bags: bags of a sample: features of the table.
        pooled: whether a bag becomes one row of output, or every id one.
        classes: how often rows are used.
    """

    name: str
    rows: int
    dim: int
    pooling: float
    classes: RowClasses
    bags: int = 1
    pooled: bool = True

    def unique(self, batch: int) -> float:
        return self.classes.unique(batch * self.pooling)

    @property
    def outputs(self) -> float:
        """Rows of output of a sample."""
        return self.bags if self.pooled else self.pooling


@dataclass(frozen=True)
class Part:
    """One part of a step.

    Attributes:
        name: of the stage.
        kind: a collective, or the rate that limits the part: ``ids``, ``lookup``, ``pooling``.
        amount_W: bytes that each rank sends, or bytes or ids that it works on.
    """

    name: str
    kind: str
    amount_W: Floats

    @property
    def is_collective(self) -> bool:
        return self.kind in COLLECTIVES

    def seconds(self, cluster: ClusterConfig, rates: RatesConfig) -> float:
        """As long as the busiest rank takes."""
        most = float(self.amount_W.max(initial=0.0))
        if self.is_collective:
            return cluster.all_to_all(most, len(self.amount_W))
        unit = 1e6 if self.kind == "ids" else GB
        return most / (float(getattr(rates, self.kind)) * unit)


@dataclass
class Step:
    """A training step of one system.

    Attributes:
        system: its name.
        tables: how many there are.
        parts: in the order of the step.
    """

    system: str
    tables: int
    parts: list[Part] = field(default_factory=list)

    def add(self, name: str, kind: str, amount_W: Floats) -> None:
        self.parts.append(Part(name, kind, amount_W))

    @property
    def bytes_sent(self) -> float:
        """By all ranks, in all collectives."""
        return float(sum(part.amount_W.sum() for part in self.parts if part.is_collective))

    @property
    def collectives(self) -> int:
        return sum(part.is_collective for part in self.parts)

    def rates(self, cluster: ClusterConfig) -> RatesConfig:
        return cluster.fused if self.system == FUSED else cluster.stock

    def seconds(self, cluster: ClusterConfig) -> float:
        """Of the whole step."""
        rates = self.rates(cluster)
        parts = sum(part.seconds(cluster, rates) for part in self.parts)
        return parts + (rates.step + rates.table * self.tables) * 1e-6


def even_rows(rows: int, ranks: int) -> Floats:
    """Shares of a table's rows on each rank, as TorchRec splits it."""
    block = -(-rows // ranks)
    sizes = np.clip(rows - block * np.arange(ranks), 0, block)
    return np.asarray(sizes / max(rows, 1), dtype=np.float64)


def fused_step(
    tables: Sequence[TableLoad],
    batch: int,
    ranks: int,
    shares_TW: Floats | None = None,
    buckets: int = 1,
    exact_counts: bool = False,
    slack: float = 0.125,
) -> Step:
    """A step of ``fused_row_wise``.

    Args:
        tables: all of them fused.
        batch: samples of a rank.
        ranks: over which the tables are sharded.
        shares_TW: share of the distinct rows of each table that each rank owns; if None, rows are
            split evenly and popular ones are anywhere.
        buckets: groups of tables of one kind, each with a count in the header.
        exact_counts: the input dist's other mode.
        slack: head room of the messages.
    """
    if shares_TW is None:
        shares_TW = np.stack([even_rows(t.rows, ranks) for t in tables])
    ids_T = np.array([batch * t.pooling for t in tables])
    unique_T = np.array([t.unique(batch) for t in tables])
    row_bytes_T = np.array([t.dim * NUMBER_BYTES for t in tables])
    output_bytes = sum(batch * t.outputs * t.dim * NUMBER_BYTES for t in tables)
    asked_W = unique_T @ shares_TW  # rows that one requester asks of each owner
    bytes_W = (unique_T * row_bytes_T) @ shares_TW
    everywhere = np.ones(ranks)

    step = Step(FUSED, len(tables))
    step.add("dedup", "ids", everywhere * ids_T.sum())
    header = COUNTS + buckets
    if exact_counts:
        step.add("counts", "all_to_all", everywhere * (ranks - 1) * header * NUMBER_BYTES)
        step.add("ids", "all_to_all", (asked_W.sum() - asked_W) * NUMBER_BYTES)
    else:
        wanted = np.ceil(asked_W.max() * (1 + slack) / GRANULE) * GRANULE
        message = (header + wanted) * NUMBER_BYTES
        step.add("ids", "all_to_all", everywhere * (ranks - 1) * message)
    step.add("lookup", "lookup", ranks * bytes_W)
    step.add("rows", "all_to_all", (ranks - 1) * bytes_W)
    step.add("pooling", "pooling", everywhere * float(ids_T @ row_bytes_T))
    step.add("pooling_backward", "pooling", everywhere * output_bytes)
    step.add("gradients", "all_to_all", bytes_W.sum() - bytes_W)
    step.add("update", "lookup", ranks * bytes_W)
    return step


def stock_step(
    system: str,
    tables: Sequence[TableLoad],
    batch: int,
    ranks: int,
    owner_T: Sequence[int] | None = None,
) -> Step:
    """A step of a stock sharding, the same for all tables.

    Args:
        system: ``table_wise``, ``row_wise`` or ``column_wise``.
        tables: all of them pooled.
        batch: samples of a rank.
        ranks: over which the tables are sharded.
        owner_T: rank of each table, if table-wise; the next less loaded one if None.
    """
    ids_T = np.array([batch * t.pooling for t in tables])
    bags_T = np.array([float(batch * t.bags) for t in tables])
    row_bytes_T = np.array([float(t.dim * NUMBER_BYTES) for t in tables])
    everywhere, others = np.ones(ranks), ranks - 1
    away = others / ranks
    step = Step(system, len(tables))
    pooled = float(bags_T @ row_bytes_T)
    # Outputs and their gradients; row-wise, partial sums of the bags of all ranks.
    written = 2 * pooled * (ranks if system == "row_wise" else 1)
    step.add("permute", "ids", everywhere * ids_T.sum())
    step.add("outputs", "pooling", everywhere * written)
    step.add("splits", "all_to_all", everywhere * others * STOCK_SPLIT_BYTES)
    if system == "table_wise":
        work_T = ids_T * row_bytes_T
        if owner_T is None:
            owner_T = _spread(work_T + bags_T * row_bytes_T, ranks)
        mine_TW = (np.array(owner_T)[:, None] == np.arange(ranks)).astype(np.float64)
        step.add("lengths", "all_to_all", bags_T.sum() * LENGTH_BYTES - bags_T @ mine_TW * 4)
        step.add("ids", "all_to_all", (ids_T.sum() - ids_T @ mine_TW) * STOCK_ID_BYTES)
        step.add("lookup", "lookup", ranks * (work_T @ mine_TW))
        pooled_W = (bags_T * row_bytes_T) @ mine_TW
        step.add("rows", "all_to_all", others * pooled_W)
        step.add("gradients", "all_to_all", pooled_W.sum() - pooled_W)
        step.add("update", "lookup", ranks * (work_T @ mine_TW))
        return step
    step.add("lengths", "all_to_all", everywhere * others * bags_T.sum() * LENGTH_BYTES)
    if system == "row_wise":
        step.add("ids", "all_to_all", everywhere * ids_T.sum() * away * STOCK_ID_BYTES)
        step.add("lookup", "lookup", everywhere * float(ids_T @ row_bytes_T))
        step.add("rows", "reduce_scatter", everywhere * others * pooled)
        step.add("gradients", "all_gather", everywhere * others * pooled)
        step.add("update", "lookup", everywhere * float(ids_T @ row_bytes_T))
        return step
    assert system == "column_wise", system
    step.add("ids", "all_to_all", everywhere * others * ids_T.sum() * STOCK_ID_BYTES)
    step.add("lookup", "lookup", everywhere * float(ids_T @ row_bytes_T))
    step.add("rows", "all_to_all", everywhere * away * pooled)
    step.add("gradients", "all_to_all", everywhere * away * pooled)
    step.add("update", "lookup", everywhere * float(ids_T @ row_bytes_T))
    return step


def _spread(work_T: Floats, ranks: int) -> list[int]:
    """The largest table first, each to the least loaded rank."""
    load, owner = np.zeros(ranks), [0] * len(work_T)
    for t in np.argsort(-work_T, kind="stable"):
        rank = int(load.argmin())
        owner[int(t)] = rank
        load[rank] += work_T[t]
    return owner
