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
from fusedrec_torchrec.sharding.sharding_type import FUSED, FUSED_TYPES

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
        owners: ranks of each table that have all of its rows: one if it is whole, several that
            share its columns; none if it is split or replicated in another way.
        ranges: of each table with fused rows, where each rank's begin; None if split evenly.
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
    owners: tuple[tuple[int, ...], ...]
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

    def numbers_of(self, system: str) -> list[int]:
        """Returns the numbers of the tables with this sharding."""
        return [t for t, other in enumerate(self.systems) if other == system]

    @cached_property
    def fused_numbers(self) -> list[int]:
        """Numbers of the tables that are fused, in whatever way."""
        return [t for t, system in enumerate(self.systems) if system in FUSED_TYPES]

    def fused_ranges(self) -> list[NDArray[np.int64]] | None:
        """Returns the ranges of the fused tables; None if rows are split evenly."""
        if self.ranges is None:
            return None
        return [self.ranges[t] for t in self.fused_numbers]

    def fused_owners(self) -> list[tuple[int, ...]]:
        """Returns the owners of the fused tables that pool them."""
        return [self.owners[t] for t in self.fused_numbers]

    def hot_use(self) -> HotUse | None:
        """Returns the hot rows of the fused tables; None if there are none."""
        if not self.hot:
            return None
        ids = [self.hot.get(self.tables[t].name, NO_ROWS) for t in self.fused_numbers]
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
            on_host=[self.on_host[t] for t in self.fused_numbers],
            owners=self.fused_owners(),
        )

    @cached_property
    def numbers_of_steps(self) -> list[list[int]]:
        """Numbers of the tables of each step: all fused ones, and those of each stock sharding.

        Bags and sequences of stock shardings are apart.
        """
        numbers = [self.fused_numbers] if self.fused_numbers else []
        for system in dict.fromkeys(self.systems):
            same = self.numbers_of(system)
            if system in FUSED_TYPES:
                continue
            pooled = [t for t in same if self.tables[t].pooled]
            sequences = [t for t in same if not self.tables[t].pooled]
            numbers += [tables for tables in (pooled, sequences) if tables]
        return numbers

    @cached_property
    def steps(self) -> list[Step]:
        """Returns a step of every sharding that is in use."""
        return [
            self._fused_step() if numbers == self.fused_numbers else self._stock_step(numbers)
            for numbers in self.numbers_of_steps
        ]

    def _fused_step(self) -> Step:
        tables = [self.tables[t] for t in self.fused_numbers]
        step = self.fused_step(tables, self.hot_use())
        ranges, owners = self.fused_ranges(), self.fused_owners()
        return with_sync(step, tables, self.batch, self.groups, ranges, owners)

    def _stock_step(self, numbers: Sequence[int]) -> Step:
        system = self.systems[numbers[0]]
        tables = [self.tables[t] for t in numbers]
        owners = [self.owners[t] for t in numbers]
        of_whole = [own[0] for own in owners if own] or None
        on_host = [self.on_host[t] for t in numbers]
        size = self.groups.size
        step = stock_step(system, tables, self.batch, size, of_whole, on_host)
        return with_sync(step, tables, self.batch, self.groups, owners=owners)

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
        ranges = self.ranges[t] if self.ranges is not None and self.systems[t] == FUSED else None
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
            own, system = self.owners[t], self.systems[t]
            if own:
                used[list(own)] += owner_bytes(table, self.batch, ranks, system, len(own))
        fused = [self.tables[t] for t in self.fused_numbers]
        return used + replica_bytes(fused, self.hot_use())

    @property
    def fits(self) -> bool:
        """Whether every rank has the memory for it."""
        return bool(self.memory_W.max() <= self.cluster.memory * GB)
