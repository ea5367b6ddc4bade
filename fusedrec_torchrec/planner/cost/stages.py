"""A training step as the cost model sees it: a list of stages, with an amount for every rank."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby

import numpy as np
from numpy.typing import NDArray

from fusedrec_torchrec.access.replication import Line, Sync
from fusedrec_torchrec.planner.cost.cluster import GB, ClusterConfig, RatesConfig
from fusedrec_torchrec.sharding.grid_options import GridSync

__all__ = ["COLLECTIVES", "HOT_SYNC", "IN_BYTES", "NO_ROWS", "Groups", "HotUse", "Stage", "Step"]

COLLECTIVES = ("all_to_all", "all_reduce", "all_gather", "reduce_scatter")
IN_BYTES = ("lookup", "pooling", "bag_lookup", "host_lookup")  # kinds of work, others are in ids
HOT_SYNC = "hot_sync"  # the stage that syncs the replicas of hot rows
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
            ``bag_ids``, ``bag_lookup``, ``owner_ids``, ``hot``.
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

    @property
    def sync(self) -> Sync:
        """The stage as a sync of replicas, as everybody who decides on hot rows sees it."""
        is_sparse = np.asarray(self.kind == "all_to_all")
        return Sync(np.asarray(self.amount_W.max()), is_sparse, round(1 / self.times))

    def seconds_W(self, cluster: ClusterConfig, rates: RatesConfig) -> Floats:
        """Returns how long each rank takes in a step."""
        exposed = self.times * (1 - cluster.hidden if self.can_hide else 1.0)
        if self.is_collective:
            return self.line(cluster).seconds(self.amount_W) * exposed
        unit = GB if self.kind in IN_BYTES else 1e6
        rate = cluster.host_lookup if self.kind == "host_lookup" else rates.rate(self.kind)
        return self.amount_W / (rate * unit) * exposed

    def seconds(self, cluster: ClusterConfig, rates: RatesConfig) -> float:
        """Returns how long the busiest rank takes."""
        return float(self.seconds_W(cluster, rates).max(initial=0.0))

    def line(self, cluster: ClusterConfig) -> Line:
        """Returns how long the collective takes on a cluster."""
        return cluster.line(self.kind, self.ranks, self.local)


@dataclass(frozen=True)
class Step:
    """Is a training step of one system, as a list of stages.

    Attributes:
        system: its name.
        tables: how many there are.
        ranks: over which they are sharded.
        stages: in the order of the step.
        buckets: how many kinds of tables there are, by columns, data type and who pools.
    """

    system: str
    tables: int
    ranks: int
    stages: list[Stage] = field(default_factory=list)
    buckets: int = 1

    def look_up(
        self,
        name: str,
        bytes_T: Floats,
        shares_TW: Floats,
        host_T: NDArray[np.bool_],
        of_bags_W: Floats | float = 0.0,
    ) -> None:
        """Adds rows that are read or written by their owners, apart those in host memory.

        Args:
            name: of the stage.
            bytes_T: of each table.
            shares_TW: of each rank in them.
            host_T: which tables are in host memory.
            of_bags_W: bytes of each rank for bags, which are of the device's memory.
        """
        self.add(name, "lookup", (bytes_T * ~host_T) @ shares_TW + of_bags_W)
        if host_T.any():
            self.add(f"{name}_on_host", "host_lookup", (bytes_T * host_T) @ shares_TW)

    def add(self, name: str, kind: str, amount_W: Floats | float) -> None:
        """Adds a stage at the end, with an amount for each rank or one for all."""
        amount_W = np.broadcast_to(np.asarray(amount_W, dtype=np.float64), (self.ranks,))
        self.stages.append(Stage(name, kind, amount_W, self.ranks))

    @property
    def sync(self) -> Sync | None:
        """The sync of hot rows, which their stage knows; None if there are none."""
        stages = [stage for stage in self.stages if stage.name == HOT_SYNC]
        return stages[0].sync if stages else None

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
        more = rates.bucket * (self.buckets - 1)
        return (rates.step + rates.table * self.tables + more) * 1e-6

    def seconds_of_stages(self, cluster: ClusterConfig) -> list[float]:
        """Returns the seconds that each stage adds to the step.

        A collective adds those of its slowest rank.  Of the work between two collectives, the rank
        with the most of it counts, with what it spends in each stage; so a stage can add nothing
        although another rank is busy in it.  What is before the first collective and behind the
        last one is looked at apart, though ranks go from one step to the next without waiting.
        """
        rates = self.rates(cluster)
        seconds: list[float] = []
        for is_collective, group in groupby(self.stages, lambda stage: stage.is_collective):
            if is_collective:
                seconds += [stage.seconds(cluster, rates) for stage in group]
                continue
            busy_SW = np.broadcast_arrays(*[stage.seconds_W(cluster, rates) for stage in group])
            busiest = int(np.sum(busy_SW, axis=0).argmax())
            seconds += [float(busy_W[busiest]) for busy_W in busy_SW]
        return seconds

    def seconds(self, cluster: ClusterConfig) -> float:
        """Returns how long the whole step takes."""
        return self.overhead(cluster) + sum(self.seconds_of_stages(cluster))

    def in_groups(self, groups: Groups) -> "Step":
        """Returns the same step where the ranks of a group are on so many nodes."""
        stages = [replace(stage, local=groups.local) for stage in self.stages]
        return replace(self, stages=stages)
