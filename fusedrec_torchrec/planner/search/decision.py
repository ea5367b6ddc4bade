"""A plan as the cost model sees it: what was decided for every table, and what that costs."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from fusedrec_torchrec.codecs.options import Codecs
from fusedrec_torchrec.planner.cost.cluster import GB, ClusterConfig
from fusedrec_torchrec.planner.cost.memory import (
    Placement,
    buffer_bytes,
    owner_bytes,
    replica_bytes,
    table_bytes_W,
)
from fusedrec_torchrec.planner.cost.step import (
    NO_ROWS,
    Groups,
    HotUse,
    Step,
    fused_step,
    stock_step,
    with_sync,
)
from fusedrec_torchrec.planner.cost.table_load import TableLoad
from fusedrec_torchrec.sharding.sharding_type import FUSED

__all__ = ["Decision"]

Hot = Mapping[str, NDArray[np.int64]]


@dataclass(frozen=True)
class Decision:
    """Is a plan of all tables, with its price on a cluster.

    Attributes:
        tables: of the model.
        batch: samples of a rank.
        cluster: that it is for.
        groups: of ranks.
        layout: where the ranks of a group are, as in ``GridOptions``.
        systems: sharding of each table.
        owners: rank of each table that is table-wise.
        ranges: of each fused table, where each rank's rows begin; None if split evenly.
        on_host: tables in host memory.
        hot: ids of the hot rows by table.
        hot_every: steps from one sync of hot rows to the next.
        exact_counts: whether ids of fused tables travel by exact counts.
        codecs: of rows and of gradients.
    """

    tables: tuple[TableLoad, ...]
    batch: int
    cluster: ClusterConfig
    groups: Groups
    systems: tuple[str, ...]
    owners: tuple[int, ...]
    layout: str = "replicas_adjacent"
    ranges: tuple[NDArray[np.int64], ...] | None = None
    on_host: tuple[bool, ...] = ()
    hot: Hot = field(default_factory=dict)
    hot_every: int = 1
    exact_counts: bool = False
    codecs: Codecs = field(default_factory=Codecs)

    @property
    def ranks(self) -> int:
        """How many ranks all groups have."""
        return self.groups.size * self.groups.number

    def places_of(self, system: str) -> list[int]:
        """Returns the numbers of the tables with this sharding."""
        return [t for t, other in enumerate(self.systems) if other == system]

    def fused_ranges(self) -> list[NDArray[np.int64]] | None:
        """Returns the ranges of the fused tables; None if rows are split evenly."""
        if self.ranges is None:
            return None
        return [self.ranges[t] for t in self.places_of(FUSED)]

    def hot_use(self) -> HotUse | None:
        """Returns the hot rows of the fused tables; None if there are none."""
        if not self.hot:
            return None
        ids = [self.hot.get(self.tables[t].name, NO_ROWS) for t in self.places_of(FUSED)]
        return HotUse(np.array([len(rows) for rows in ids]), self.hot_every, ids)

    def fused_step(self, tables: Sequence[TableLoad], hot: HotUse | None) -> Step:
        """Returns a step of the fused tables, with these hot rows."""
        return fused_step(
            tables,
            self.batch,
            self.groups.size,
            self.fused_ranges(),
            exact_counts=self.exact_counts,
            hot=hot,
            codecs=self.codecs,
            on_host=[self.on_host[t] for t in self.places_of(FUSED)],
        )

    @cached_property
    def places_of_steps(self) -> list[list[int]]:
        """Numbers of the tables of each step: of one sharding, stock bags and sequences apart."""
        places = []
        for system in dict.fromkeys(self.systems):
            same = self.places_of(system)
            if system == FUSED:
                places.append(same)
                continue
            pooled = [t for t in same if self.tables[t].pooled]
            sequences = [t for t in same if not self.tables[t].pooled]
            places += [tables for tables in (pooled, sequences) if tables]
        return places

    @cached_property
    def steps(self) -> list[Step]:
        """Returns a step of every sharding that is in use."""
        return [
            self._fused_step() if self.systems[places[0]] == FUSED else self._stock_step(places)
            for places in self.places_of_steps
        ]

    def _fused_step(self) -> Step:
        tables = [self.tables[t] for t in self.places_of(FUSED)]
        step = self.fused_step(tables, self.hot_use())
        return with_sync(step, tables, self.batch, self.groups, self.fused_ranges())

    def _stock_step(self, places: Sequence[int]) -> Step:
        system = self.systems[places[0]]
        tables = [self.tables[t] for t in places]
        owners = [self.owners[t] for t in places]
        on_host = [self.on_host[t] for t in places]
        size = self.groups.size
        step = stock_step(system, tables, self.batch, size, owners, on_host)
        ranges = None
        if system == "table_wise":
            ranges = [
                np.where(np.arange(size + 1) > owner, table.rows, 0)
                for table, owner in zip(tables, owners, strict=True)
            ]
        return with_sync(step, tables, self.batch, self.groups, ranges)

    def alone(self, t: int) -> "Decision":
        """Returns what was decided for one table, as if there were no other."""
        name = self.tables[t].name
        return replace(
            self,
            tables=(self.tables[t],),
            systems=(self.systems[t],),
            owners=(self.owners[t],),
            ranges=None if self.ranges is None else (self.ranges[t],),
            on_host=(self.on_host[t],),
            hot={name: self.hot[name]} if name in self.hot else {},
        )

    @cached_property
    def seconds(self) -> float:
        """Returns how long a step takes."""
        return sum(step.seconds(self.cluster) for step in self.steps)

    @property
    def bytes_sent(self) -> float:
        """Bytes that all ranks send in a step."""
        return sum(step.bytes_sent for step in self.steps) * self.groups.number

    def placement(self, t: int) -> Placement:
        """Returns where a table is."""
        ranges = self.ranges[t] if self.ranges and self.systems[t] == FUSED else None
        return Placement(self.systems[t], self.owners[t], ranges)

    @cached_property
    def memory_W(self) -> NDArray[np.float64]:
        """Bytes that are taken on the device of each rank of a group."""
        ranks = self.groups.size
        used = np.zeros(ranks)
        for t, table in enumerate(self.tables):
            on_device = 0.0 if self.on_host[t] else 1.0
            used += on_device * table_bytes_W(table, self.placement(t), ranks)
            used += buffer_bytes(table, self.systems[t], self.batch, ranks)
            if self.systems[t] == "table_wise":
                used[self.owners[t]] += owner_bytes(table, self.batch, ranks)
        fused = [self.tables[t] for t in self.places_of(FUSED)]
        return used + replica_bytes(fused, self.hot_use())

    @property
    def fits(self) -> bool:
        """Whether every rank has the memory for it."""
        return bool(self.memory_W.max() <= self.cluster.memory * GB)
