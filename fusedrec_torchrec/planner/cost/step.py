"""What a training step costs, formula by formula: bytes of each collective, work of each stage.

A step is a list of stages, each with a number for every rank: bytes that the rank sends in a
collective, or bytes and ids that it works on.  Bytes are countable, and benchmarks count them.
Seconds come from a cluster's rates, and a stage takes as long as it takes the busiest rank.

Letters: W ranks; T tables; B samples of a rank's batch; n ids of a table in it, B times its
pooling; U distinct rows among them, the sum over rows of 1 - (1 - p)^n; D columns; 4 bytes a
number; s the share of a table's U rows that a rank owns.

==================  ==============================================================================
fused_row_wise
------------------  ------------------------------------------------------------------------------
dedup               n ids are made keys, unique, and bags of rows
ids                 W - 1 messages of header and capacity: the most rows asked of one owner, with
                    slack; 4 bytes each.  With exact counts: the headers, then U (1 - s) ids
lookup              an owner reads the rows that W ranks ask for, W U s
rows                an owner sends what W - 1 others asked for, (W - 1) U s rows as the codec
                    writes them
pooling             n rows are read and pooled
pooling_backward    gradients of the outputs are summed for each of the U rows
gradients           the rows' way back, U (1 - s)
update              an owner applies what W ranks sent

with hot rows       U is of the other rows, and
hot_lookup          n ids are looked for among the hot rows
hot_sync            H distinct hot rows of a batch go to W - 1 ranks, with their places; or all hot
                    rows are summed by an all-reduce, 2 (W - 1) / W, if that is fewer bytes.  Every
                    k steps, H is of k batches

in 2D               W is the ranks of a group, of which there are M, and
sync_ids            numbers of the V rows that the W ranks of a group used since the last sync, to
                    M - 1 replicas; a rank has V / W of them
sync_rows           the rows that some group used, with optimizer state, in an all-reduce among the
                    M replicas; or the whole shard if that is fewer bytes
sync_gradients      if gradients are shared: those of the V rows of a step to M - 1 replicas
------------------  ------------------------------------------------------------------------------
table_wise          ids (8 bytes) and lengths (4) go to the table's rank, pooled rows (D) come back
                    for every bag, their gradients go; lookup and update of n ids, not of U
row_wise            ids to the row's rank, lengths to all; partial sums of every bag from all ranks
                    in a reduce-scatter, gradients to all in an all-gather
column_wise         ids and lengths to all ranks, D / W columns of every bag from each
data_parallel       nothing travels but the gradient of the whole table, in an all-reduce
==================  ==============================================================================

In stock shardings of sequences a row travels for every id, where there are bags here.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from fusedrec_torchrec.access.replication import sync_bytes
from fusedrec_torchrec.codecs.options import Codecs
from fusedrec_torchrec.codecs.wire import bytes_of_row
from fusedrec_torchrec.exchange.capacity import GRANULE
from fusedrec_torchrec.exchange.messages import COUNTS
from fusedrec_torchrec.planner.cost.cluster import GB, ClusterConfig, RatesConfig
from fusedrec_torchrec.planner.cost.table_load import NUMBER_BYTES, TableLoad, even_ranges
from fusedrec_torchrec.sharding.grid_options import GridSync
from fusedrec_torchrec.sharding.sharding_type import FUSED, SHARDINGS

__all__ = [
    "STOCK",
    "Groups",
    "HotUse",
    "Stage",
    "Step",
    "fused_step",
    "stock_step",
    "with_sync",
]

STOCK = tuple(kind for kind in SHARDINGS if kind != FUSED)
COLLECTIVES = ("all_to_all", "all_reduce", "all_gather", "reduce_scatter")
STOCK_ID_BYTES, LENGTH_BYTES = 8, 4
STOCK_SPLIT_BYTES = 24  # of TorchRec's first all-to-all, to each other rank
SLACK = 0.125
NO_ROWS = np.empty(0, np.int64)
Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Groups:
    """Says how the ranks of a step are grouped: one group of all, or 2D parallelism.

    Attributes:
        size: ranks of a group.
        number: groups.
        local: ranks of a group on one node; as many as can be if None.
        local_replicas: replicas of a shard on one node.
        sync: what replicas exchange.
        sync_every: steps from one sync of weights to the next.
    """

    size: int
    number: int = 1
    local: int | None = None
    local_replicas: int | None = None
    sync: GridSync = "weights"
    sync_every: int = 1


@dataclass(frozen=True)
class HotUse:
    """Says which rows are hot in a step.

    Attributes:
        rows_T: how many of the most used rows of each table.
        sync_every: steps from one sync of the replicas to the next.
        ids: of each table, which rows; only their number counts where places are unknown.
    """

    rows_T: NDArray[np.int64]
    sync_every: int = 1
    ids: Sequence[NDArray[np.int64]] = ()

    def of(self, table: int) -> NDArray[np.int64]:
        """Returns the hot rows of a table, as far as they are known."""
        return self.ids[table] if self.ids else NO_ROWS

    @property
    def rows(self) -> int:
        """How many rows of all tables are hot."""
        return int(self.rows_T.sum())


@dataclass(frozen=True)
class Stage:
    """Is one stage of a step: a collective, or work of the ranks themselves.

    Attributes:
        name: what it is called.
        kind: a collective, or the rate that limits the stage: ``ids``, ``lookup``, ``pooling``,
            ``hot``.
        amount_W: bytes that each rank sends, or bytes or ids that it works on.
        ranks: that take part in the collective.
        local: of them, on one node.
        times: how often in a step; 1 / k if every k steps.
        can_hide: whether other work can go on meanwhile.
    """

    name: str
    kind: str
    amount_W: Floats
    ranks: int
    local: int | None = None
    times: float = 1.0
    can_hide: bool = False

    @property
    def is_collective(self) -> bool:
        """Whether ranks exchange something."""
        return self.kind in COLLECTIVES

    @property
    def bytes_sent(self) -> float:
        """Bytes that all ranks send in a step."""
        return float(self.amount_W.sum()) * self.times if self.is_collective else 0.0

    def seconds_W(self, cluster: ClusterConfig, rates: RatesConfig) -> Floats:
        """Returns how long each rank takes in a step."""
        exposed = self.times * (1 - cluster.hidden if self.can_hide else 1.0)
        if self.is_collective:
            base, slope = self.line(cluster)
            return (base + slope * self.amount_W) * exposed
        unit = GB if self.kind in ("lookup", "pooling", "host_lookup") else 1e6
        rate = cluster.host_lookup if self.kind == "host_lookup" else getattr(rates, self.kind)
        return self.amount_W / (float(rate) * unit) * exposed

    def seconds(self, cluster: ClusterConfig, rates: RatesConfig) -> float:
        """Returns how long the busiest rank takes."""
        return float(self.seconds_W(cluster, rates).max(initial=0.0))

    def line(self, cluster: ClusterConfig) -> tuple[float, float]:
        """Returns the seconds without data, and those for each byte that a rank sends."""
        if self.kind == "all_reduce":
            base = cluster.all_reduce(0.0, self.ranks, self.local)
            size = self.ranks / max(2 * (self.ranks - 1), 1)
            return base, (cluster.all_reduce(1e6 * size, self.ranks, self.local) - base) / 1e6
        base = cluster.all_to_all(0.0, self.ranks, self.local)
        return base, (cluster.all_to_all(1e6, self.ranks, self.local) - base) / 1e6


@dataclass(frozen=True)
class Step:
    """Is a training step of one system, as a list of stages.

    Attributes:
        system: its name.
        tables: how many there are.
        ranks: over which they are sharded.
        stages: in the order of the step.
    """

    system: str
    tables: int
    ranks: int
    stages: list[Stage] = field(default_factory=list)

    def add(self, name: str, kind: str, amount_W: Floats | float) -> None:
        """Adds a stage at the end, with an amount for each rank or one for all."""
        amount_W = np.broadcast_to(np.asarray(amount_W, dtype=np.float64), (self.ranks,))
        self.stages.append(Stage(name, kind, amount_W, self.ranks))

    @property
    def bytes_sent(self) -> float:
        """Bytes that all ranks send in all collectives."""
        return sum(stage.bytes_sent for stage in self.stages)

    @property
    def collectives(self) -> float:
        """How many collectives there are in a step, in the mean."""
        return sum(stage.times for stage in self.stages if stage.is_collective)

    def rates(self, cluster: ClusterConfig) -> RatesConfig:
        """Returns the rates of this system on a cluster."""
        return cluster.rates(self.system)

    def overhead(self, cluster: ClusterConfig) -> float:
        """Returns the seconds that do not depend on the size of anything."""
        rates = self.rates(cluster)
        return (rates.step + rates.table * self.tables) * 1e-6

    def seconds(self, cluster: ClusterConfig) -> float:
        """Returns how long the whole step takes."""
        rates = self.rates(cluster)
        return self.overhead(cluster) + sum(stage.seconds(cluster, rates) for stage in self.stages)

    def in_groups(self, groups: Groups) -> "Step":
        """Returns the same step where the ranks of a group are on so many nodes."""
        stages = [replace(stage, local=groups.local) for stage in self.stages]
        return Step(self.system, self.tables, self.ranks, stages)


def fused_step(
    tables: Sequence[TableLoad],
    batch: int,
    ranks: int,
    ranges: Sequence[NDArray[np.int64]] | None = None,
    exact_counts: bool = False,
    slack: float = SLACK,
    hot: HotUse | None = None,
    codecs: Codecs | None = None,
    on_host: Sequence[bool] | None = None,
) -> Step:
    """Returns a step of ``fused_row_wise``.

    Args:
        tables: all of them fused.
        batch: samples of a rank.
        ranks: over which the tables are sharded.
        ranges: where each rank's rows begin, of each table, and the end; if None, rows are split
            evenly.
        exact_counts: the input dist's other mode.
        slack: head room of the messages.
        hot: rows that are replicated.
        codecs: of rows and of gradients; None if they travel as they are.
        on_host: which tables are in host memory.
    """
    hot_T = np.zeros(len(tables), np.int64) if hot is None else hot.rows_T
    shares_TW = _shares(tables, batch, ranks, ranges, hot)
    ids_T = np.array([table.ids(batch) for table in tables])
    unique_T = np.array([t.unique(batch, int(h)) for t, h in zip(tables, hot_T, strict=True)])
    dims_T = np.array([float(table.dim) for table in tables])
    table_bytes_T = np.array([float(table.dim * table.element_bytes) for table in tables])
    outputs = sum(batch * t.outputs * t.dim * NUMBER_BYTES for t in tables)
    asked_W = unique_T @ shares_TW  # rows that one requester asks of each owner
    bytes_T2 = np.array([bytes_of_row(codecs or Codecs(), table.dim) for table in tables])
    rows_W, gradients_W = ((unique_T * bytes_T) @ shares_TW for bytes_T in bytes_T2.T)
    host_T = np.zeros(len(tables), bool) if on_host is None else np.array(on_host, bool)

    step = Step(FUSED, len(tables), ranks)
    step.add("dedup", "ids", ids_T.sum())
    if hot is not None and hot.rows:
        step.add("hot_lookup", "hot", ids_T.sum())
    header = COUNTS + len({(table.dim, table.kind) for table in tables})
    if exact_counts:
        step.add("counts", "all_to_all", (ranks - 1) * header * NUMBER_BYTES)
        step.add("ids", "all_to_all", (asked_W.sum() - asked_W) * NUMBER_BYTES)
    else:
        wanted = np.ceil(asked_W.max() * (1 + slack) / GRANULE) * GRANULE
        step.add("ids", "all_to_all", (ranks - 1) * (header + wanted) * NUMBER_BYTES)
    _look_up(step, "lookup", ranks * unique_T * table_bytes_T, shares_TW, host_T)
    step.add("rows", "all_to_all", (ranks - 1) * rows_W)
    step.add("pooling", "pooling", float(ids_T @ dims_T) * NUMBER_BYTES)
    step.add("pooling_backward", "pooling", outputs)
    step.add("gradients", "all_to_all", gradients_W.sum() - gradients_W)
    _look_up(step, "update", ranks * unique_T * table_bytes_T, shares_TW, host_T)
    if hot is not None and hot.rows:
        step.stages.append(_hot_sync(tables, batch, ranks, hot))
    return step


def _shares(
    tables: Sequence[TableLoad],
    batch: int,
    ranks: int,
    ranges: Sequence[NDArray[np.int64]] | None,
    hot: HotUse | None,
) -> Floats:
    """Returns the share of each rank in the distinct rows of each table that are not hot."""
    shares = []
    for t, table in enumerate(tables):
        ids = NO_ROWS if hot is None else hot.of(t)
        if ranges is None and not len(ids):
            shares.append(table.even_share(ranks, batch))
        else:
            own = even_ranges(table.rows, ranks) if ranges is None else ranges[t]
            shares.append(table.share(own, batch, ids))
    return np.stack(shares)


def _look_up(
    step: Step, name: str, bytes_T: Floats, shares_TW: Floats, host_T: NDArray[np.bool_]
) -> None:
    step.add(name, "lookup", (bytes_T * ~host_T) @ shares_TW)
    if host_T.any():
        step.add(f"{name}_on_host", "host_lookup", (bytes_T * host_T) @ shares_TW)


def _hot_sync(tables: Sequence[TableLoad], batch: int, ranks: int, hot: HotUse) -> Stage:
    """Returns the sync of hot rows, in the way that sends fewer bytes."""
    touched = sum(
        (t.unique(batch * hot.sync_every) - t.unique(batch * hot.sync_every, int(h)))
        * (t.dim + 1)
        * NUMBER_BYTES
        for t, h in zip(tables, hot.rows_T, strict=True)
    )
    dims_T = np.array([table.dim for table in tables])
    replicated = float(hot.rows_T @ (dims_T + 1)) * NUMBER_BYTES
    sparse, dense = sync_bytes(touched, replicated, ranks)
    kind, sent = ("all_to_all", sparse) if sparse <= dense else ("all_reduce", dense)
    amount_W = np.full(ranks, sent)
    return Stage("hot_sync", kind, amount_W, ranks, times=1 / hot.sync_every, can_hide=True)


def with_sync(
    step: Step,
    tables: Sequence[TableLoad],
    batch: int,
    groups: Groups,
    ranges: Sequence[NDArray[np.int64]] | None = None,
) -> Step:
    """Returns a step of one of several groups, with the sync of their replicas."""
    step = step.in_groups(groups)
    size, number = groups.size, groups.number
    if number < 2:
        return step
    shares_TW = _shares(tables, batch, size, ranges, None)
    if ranges is None:
        ranges = [even_ranges(table.rows, size) for table in tables]
    steps = groups.sync_every
    group_T = np.array([t.unique(batch * size * steps) for t in tables])
    own_W = group_T @ shares_TW

    def stage(name: str, kind: str, amount_W: Floats, times: float = 1.0) -> Stage:
        return Stage(name, kind, amount_W, number, groups.local_replicas, times)

    if groups.sync == "gradients":
        sent_T = group_T * np.array([(t.dim + 1) * NUMBER_BYTES for t in tables])
        step.stages.append(
            stage("sync_gradients", "all_to_all", (number - 1) * (sent_T @ shares_TW))
        )
        return step
    somewhere_T = np.array([t.unique(batch * size * number * steps) for t in tables])
    bytes_T = np.array([float(t.row_bytes) for t in tables])
    touched_W = (somewhere_T * bytes_T) @ shares_TW
    whole_W = sum(
        np.diff(own) * t.row_bytes for t, own in zip(tables, ranges, strict=True)
    ) + np.zeros(size)
    reduced = 2 * (number - 1) / number
    numbers_W = (number - 1) * own_W * NUMBER_BYTES * (1 + SLACK)
    if (reduced * touched_W + numbers_W).max() < reduced * whole_W.max():
        step.stages.append(stage("sync_ids", "all_to_all", numbers_W, 1 / steps))
        step.stages.append(stage("sync_rows", "all_reduce", reduced * touched_W, 1 / steps))
    else:
        step.stages.append(stage("sync_rows", "all_reduce", reduced * whole_W, 1 / steps))
    return step


def stock_step(
    system: str,
    tables: Sequence[TableLoad],
    batch: int,
    ranks: int,
    owner_T: Sequence[int] | None = None,
    on_host: Sequence[bool] | None = None,
) -> Step:
    """Returns a step of a stock sharding, the same for all tables.

    Args:
        system: one of ``STOCK``.
        tables: all of them pooled, or none.
        batch: samples of a rank.
        ranks: over which the tables are sharded.
        owner_T: rank of each table, if table-wise; the next less loaded one if None.
        on_host: which tables are in host memory.
    """
    assert system in STOCK, system
    host_T = np.zeros(len(tables), bool) if on_host is None else np.array(on_host, bool)
    stock = _StockTables(tables, batch, ranks, host_T)
    step = Step(system, len(tables), ranks)
    # Outputs and their gradients; row-wise, partial sums of the bags of all ranks.
    is_partial = system == "row_wise" and stock.is_pooled
    step.add("permute", "ids", stock.ids_T.sum())
    step.add("outputs", "pooling", 2 * stock.pooled * (ranks if is_partial else 1))
    if system == "data_parallel":
        stock.add_data_parallel(step)
        return step
    step.add("splits", "all_to_all", (ranks - 1) * STOCK_SPLIT_BYTES)
    if system == "table_wise":
        stock.add_table_wise(step, owner_T)
        return step
    step.add("lengths", "all_to_all", (ranks - 1) * stock.bags_T.sum() * LENGTH_BYTES)
    if system == "row_wise":
        stock.add_row_wise(step)
    else:
        stock.add_column_wise(step)
    return step


class _StockTables:
    """Adds the stages of stock shardings to a step, for tables that are sharded alike."""

    def __init__(
        self,
        tables: Sequence[TableLoad],
        batch: int,
        ranks: int,
        host_T: NDArray[np.bool_],
    ) -> None:
        self._tables, self._ranks, self._host_T = tables, ranks, host_T
        self.ids_T = np.array([table.ids(batch) for table in tables])
        self.bags_T = np.array([float(batch * table.bags) for table in tables])
        out_T = np.array([batch * table.outputs for table in tables])
        row_bytes_T = np.array([float(table.dim * NUMBER_BYTES) for table in tables])
        table_bytes_T = np.array([float(table.dim * table.element_bytes) for table in tables])
        self._read_T = self.ids_T * table_bytes_T
        self._work_T, self._pooled_T = self.ids_T * row_bytes_T, out_T * row_bytes_T
        self.pooled = float(self._pooled_T.sum())
        self.is_pooled = all(table.pooled for table in tables)

    def add_data_parallel(self, step: Step) -> None:
        size = sum(table.rows * table.dim * NUMBER_BYTES for table in self._tables)
        step.add("lookup", "lookup", self._read_T.sum())
        step.add("gradients", "all_reduce", 2 * (self._ranks - 1) / self._ranks * size)
        step.add("update", "lookup", 2 * size)

    def add_table_wise(self, step: Step, owner_T: Sequence[int] | None) -> None:
        ranks, ids_T, bags_T = self._ranks, self.ids_T, self.bags_T
        if owner_T is None:
            owner_T = spread(self._work_T + self._pooled_T, ranks)
        mine_TW = (np.array(owner_T)[:, None] == np.arange(ranks)).astype(np.float64)
        step.add("lengths", "all_to_all", (bags_T.sum() - bags_T @ mine_TW) * LENGTH_BYTES)
        step.add("ids", "all_to_all", (ids_T.sum() - ids_T @ mine_TW) * STOCK_ID_BYTES)
        _look_up(step, "lookup", ranks * self._read_T, mine_TW, self._host_T)
        pooled_W = self._pooled_T @ mine_TW
        step.add("rows", "all_to_all", (ranks - 1) * pooled_W)
        step.add("gradients", "all_to_all", pooled_W.sum() - pooled_W)
        _look_up(step, "update", ranks * self._read_T, mine_TW, self._host_T)

    def add_row_wise(self, step: Step) -> None:
        ranks, others = self._ranks, self._ranks - 1
        shares_TW = np.stack([t.access_share(even_ranges(t.rows, ranks)) for t in self._tables])
        ids_W, work_W = self.ids_T @ shares_TW, ranks * (self._work_T @ shares_TW)
        step.add("ids", "all_to_all", (ids_W.sum() - ids_W) * STOCK_ID_BYTES)
        _look_up(step, "lookup", ranks * self._read_T, shares_TW, self._host_T)
        if self.is_pooled:
            step.add("rows", "reduce_scatter", others * self.pooled)
            step.add("gradients", "all_gather", others * self.pooled)
        else:
            sent_W = work_W / ranks
            step.add("rows", "all_to_all", others * sent_W)
            step.add("gradients", "all_to_all", sent_W.sum() - sent_W)
        _look_up(step, "update", ranks * self._read_T, shares_TW, self._host_T)

    def add_column_wise(self, step: Step) -> None:
        ranks, others = self._ranks, self._ranks - 1
        step.add("ids", "all_to_all", others * self.ids_T.sum() * STOCK_ID_BYTES)
        everywhere_TW = np.ones((len(self._tables), ranks))
        _look_up(step, "lookup", self._read_T, everywhere_TW, self._host_T)
        step.add("rows", "all_to_all", others / ranks * self.pooled)
        step.add("gradients", "all_to_all", others / ranks * self.pooled)
        _look_up(step, "update", self._read_T, everywhere_TW, self._host_T)


def spread(work_T: Floats, ranks: int) -> list[int]:
    """Returns the rank of each table: the largest table first, always to the least loaded rank."""
    load, owner = np.zeros(ranks), [0] * len(work_T)
    for t in np.argsort(-work_T, kind="stable"):
        rank = int(load.argmin())
        owner[int(t)] = rank
        load[rank] += work_T[t]
    return owner
