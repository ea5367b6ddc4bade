"""Which table is sharded how: fused, or in one of TorchRec's ways.

A sharding has a price for being used at all (Python, latencies) and a price for each table.  The
prices of tables add up, but for table-wise sharding, whose busiest rank counts.  So for each set of
shardings that could be in use: every table takes its cheapest, tables that are whole go to ranks in
turn, the largest first, and then tables move, one by one, as long as that makes the step shorter.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fusedrec_torchrec.planner.cost.cluster import ClusterConfig
from fusedrec_torchrec.planner.cost.memory import buffer_bytes, owner_bytes
from fusedrec_torchrec.planner.cost.step import (
    SLACK,
    Groups,
    Step,
    fused_step,
    stock_step,
    with_sync,
)
from fusedrec_torchrec.planner.cost.table_load import NUMBER_BYTES, TableLoad
from fusedrec_torchrec.sharding.sharding_type import FUSED

__all__ = ["Assignment", "NoRoomError", "Prices", "assign"]

TABLE_WISE = "table_wise"
MOST_SWEEPS = 20
FEW, MANY_STARTS = 12, 40  # tables
ALL_RANKS = 16  # up to so many are tried for a table, else the least loaded ones
Floats = NDArray[np.float64]


class NoRoomError(ValueError):
    """Is raised if tables do not fit into memory; the text says which and by how much."""


@dataclass(frozen=True)
class Assignment:
    """Says which sharding every table has.

    Attributes:
        systems: sharding of each table.
        owners: rank of each table that is table-wise; 0 for others.
        seconds: of a step, if rows are balanced.
    """

    systems: tuple[str, ...]
    owners: tuple[int, ...]
    seconds: float


class Prices:
    """Holds what tables and shardings cost on a cluster.

    Args:
        tables: to be sharded.
        batch: samples of a rank.
        cluster: with its rates.
        groups: of ranks.
        systems: shardings that have a price.
        on_host: tables in host memory.
        exact_counts: how ids of fused tables travel.
    """

    def __init__(
        self,
        tables: Sequence[TableLoad],
        batch: int,
        cluster: ClusterConfig,
        groups: Groups,
        systems: Sequence[str],
        on_host: Sequence[bool],
        exact_counts: bool = False,
    ) -> None:
        self._exact_counts = exact_counts
        self.ranks = groups.size
        self._cluster, self._groups, self._batch = cluster, groups, batch
        self.of_use: dict[str, float] = {}
        self.of_tables: dict[str, Floats] = {}
        nothing = TableLoad("", 0, 4, 0.0, tables[0].classes, bags=0)
        for system in systems:
            of_table = cluster.rates(system).table * 1e-6
            base = self._step(system, nothing, False).seconds(cluster) - of_table
            self.of_use[system] = base
            known: dict[tuple[object, ...], float] = {}
            prices = []
            for table, host in zip(tables, on_host, strict=True):
                size = (table.rows, table.dim, table.row_bytes)
                key = (*size, table.pooling, table.classes, table.bags, table.pooled, host)
                if key not in known:
                    known[key] = self._step(system, table, host).seconds(cluster) - base
                prices.append(known[key])
            self.of_tables[system] = np.array(prices)
        step = stock_step(TABLE_WISE, [nothing], batch, self.ranks).in_groups(groups)
        self._wire = next(stage for stage in step.stages if stage.name == "rows").line(cluster)[1]
        self._lookup = 2 * self.ranks / (cluster.rates(TABLE_WISE).lookup * 1e9)
        self.loads_KT = np.array(
            [
                [batch * t.bags * 4.0 for t in tables],
                [8.0 * t.ids(batch) for t in tables],
                [t.ids(batch) * t.dim * NUMBER_BYTES for t in tables],
                [batch * t.outputs * t.dim * NUMBER_BYTES for t in tables],
            ]
        )

    def _step(self, system: str, table: TableLoad, host: bool) -> Step:
        """Returns a step of one table alone, its rows balanced.

        Table-wise, it is without what the busiest rank adds.
        """
        spread = replace(table, places=None)
        even: Any = [np.linspace(0, table.rows, self.ranks + 1)]
        if system == FUSED:
            step = fused_step(
                [spread], self._batch, self.ranks, even, exact_counts=True, on_host=[host]
            )
            if not self._exact_counts:  # whose messages have one capacity for all tables
                stages = [
                    replace(p, amount_W=p.amount_W * (1 + SLACK)) if p.name == "ids" else p
                    for p in step.stages
                    if p.name != "counts"
                ]
                step = replace(step, stages=stages)
            return with_sync(step, [spread], self._batch, self._groups, even)
        host &= system != TABLE_WISE  # whole tables stay on devices
        step = stock_step(system, [spread], self._batch, self.ranks, on_host=[host])
        if system == TABLE_WISE:
            alone = {"lengths", "ids", "lookup", "rows", "gradients", "update"}
            stages = [
                replace(p, amount_W=np.zeros(self.ranks)) if p.name in alone else p
                for p in step.stages
            ]
            step = replace(step, stages=stages)
        return with_sync(step, [spread], self._batch, self._groups, even)

    def of_whole_tables(self, loads_KW: Floats) -> float:
        """Returns what the busiest rank adds to a table-wise step; loads are as in loads_KT."""
        lengths, ids, work, pooled = loads_KW
        wire = lengths.sum() - lengths.min() + ids.sum() - ids.min()
        wire += (self.ranks - 1) * pooled.max() + pooled.sum() - pooled.min()
        return float(self._wire * wire + self._lookup * work.max())

    def balanced(self, system: str) -> Floats:
        """Returns the prices of tables if table-wise load were spread evenly."""
        prices = self.of_tables[system]
        if system != TABLE_WISE:
            return prices
        lengths, ids, work, pooled = self.loads_KT
        away = (self.ranks - 1) / self.ranks
        wire = away * (lengths + ids + 2 * pooled)
        return np.asarray(prices + self._wire * wire + self._lookup * work / self.ranks)


def assign(
    tables: Sequence[TableLoad],
    allowed: Sequence[Sequence[str]],
    prices: Prices,
    batch: int,
    room: float,
) -> list[Assignment]:
    """Returns the shortest step that the search finds for each set of shardings, in order.

    Args:
        tables: to be sharded.
        allowed: shardings that each table may have.
        prices: of them.
        batch: samples of a rank.
        room: bytes of a rank.

    Raises:
        NoRoomError: there is none that fits.
    """
    systems = [s for s in prices.of_use if any(s in options for options in allowed)]
    assignments: list[Assignment] = []
    problem: NoRoomError | None = None
    for chosen in _subsets(systems):
        if not all(any(s in chosen for s in options) for options in allowed):
            continue
        # From where every table is at its cheapest; few tables also from where they are all alike.
        starts = [None, *chosen] if len(chosen) > 1 and len(tables) <= MANY_STARTS else [None]
        for first in starts:
            try:
                search = _Search(tables, allowed, prices, batch, room, chosen, first)
            except NoRoomError as error:
                problem = problem or error
                continue
            search.improve()
            assignments.append(search.result())
    if not assignments:
        assert problem is not None
        raise problem
    return sorted(dict.fromkeys(assignments), key=lambda assignment: assignment.seconds)


def _subsets(systems: Sequence[str]) -> Iterator[tuple[str, ...]]:
    for size in range(1, len(systems) + 1):
        yield from combinations(systems, size)


class _Search:
    """Holds a choice of systems for all tables, and moves single tables."""

    def __init__(
        self,
        tables: Sequence[TableLoad],
        allowed: Sequence[Sequence[str]],
        prices: Prices,
        batch: int,
        room: float,
        chosen: Sequence[str],
        first: str | None,
    ) -> None:
        self._tables, self._prices, self._room = tables, prices, room
        self._ranks = prices.ranks
        self._allowed = [[s for s in chosen if s in options] for options in allowed]
        self._loads_KW = np.zeros((4, self._ranks))
        self._used_W = np.zeros(self._ranks)
        self._owner = [0] * len(tables)
        self._system = [""] * len(tables)
        self._count: Mapping[str, int] = dict.fromkeys(chosen, 0)
        self._sum = 0.0  # of prices that add up
        self._buffers = {
            s: np.array([buffer_bytes(t, s, batch, self._ranks) for t in tables]) for s in chosen
        }
        self._of_owner = [owner_bytes(t, batch, self._ranks) for t in tables]
        balanced = {s: prices.balanced(s) for s in chosen}
        self._order = sorted(range(len(tables)), key=lambda t: (-tables[t].size, t))
        for t in self._order:
            options = sorted(self._allowed[t], key=lambda s: (s != first, balanced[s][t], s))
            for system in options:
                if self._put(t, system):
                    break
            else:
                self._no_room(t, options)

    def _no_room(self, t: int, options: Sequence[str]) -> None:
        need = min(sum(self._bytes(t, s)) for s in options)
        left = self._room - (self._used_W.max() if FUSED in options else self._used_W.min())
        raise NoRoomError(
            f"table {self._tables[t].name!r} does not fit: with {' or '.join(options)} it needs "
            f"{need / 1e9:.3g} GB of a rank, {max(left, 0) / 1e9:.3g} of {self._room / 1e9:.3g} GB "
            f"are left, {(need - max(left, 0)) / 1e9:.3g} GB are missing; more ranks, more memory "
            "of the cluster, or a smaller table"
        )

    def _bytes(self, t: int, system: str) -> tuple[float, float]:
        """Returns the bytes of a table on each rank, and beside that on its owner."""
        table, buffers = self._tables[t], float(self._buffers[system][t])
        if system == TABLE_WISE:
            return buffers, table.size + self._of_owner[t]
        whole = table.size if system == "data_parallel" else table.size / self._ranks
        return whole + buffers, 0.0

    def _put(self, t: int, system: str, owner: int | None = None) -> bool:
        """Gives a table a sharding, and returns whether there was room for it."""
        on_each, on_owner = self._bytes(t, system)
        if self._used_W.max() + on_each > self._room:
            return False
        if system == TABLE_WISE:
            size = on_each + on_owner
            if owner is None:
                fits = self._used_W + size <= self._room
                if not fits.any():
                    return False
                load = self._loads_KW[2:].sum(0)
                owner = int(np.where(fits, load, np.inf).argmin())
            elif self._used_W[owner] + size > self._room:
                return False
            self._used_W[owner] += on_owner
            self._loads_KW[:, owner] += self._prices.loads_KT[:, t]
            self._owner[t] = owner
        self._used_W += on_each
        self._system[t] = system
        self._sum += float(self._prices.of_tables[system][t])
        if not self._count[system]:
            self._sum += self._prices.of_use[system]
        self._count[system] += 1  # type: ignore[index]
        return True

    def _take(self, t: int) -> None:
        system = self._system[t]
        on_each, on_owner = self._bytes(t, system)
        self._used_W -= on_each
        if system == TABLE_WISE:
            self._used_W[self._owner[t]] -= on_owner
            self._loads_KW[:, self._owner[t]] -= self._prices.loads_KT[:, t]
        self._sum -= float(self._prices.of_tables[system][t])
        self._count[system] -= 1  # type: ignore[index]
        if not self._count[system]:
            self._sum -= self._prices.of_use[system]

    @property
    def _seconds(self) -> float:
        if not self._count.get(TABLE_WISE):
            return self._sum
        return self._sum + self._prices.of_whole_tables(self._loads_KW)

    def improve(self) -> None:
        """Moves tables until no move helps: the best move first if tables are few."""
        few = len(self._tables) <= FEW
        for _ in range(MOST_SWEEPS * (len(self._tables) if few else 1)):
            moved = False
            if few:
                gains = [self._best_move(t) for t in self._order]
                t, (_, chosen) = min(zip(self._order, gains, strict=True), key=lambda g: g[1][0])
                moved = self._move(t, chosen)
            else:
                for t in self._order:
                    moved |= self._move(t, self._best_move(t)[1])
            if not moved and not self._swap():
                return

    def _best_move(self, t: int) -> tuple[float, tuple[str, int]]:
        """Returns the shortest step that a move of one table leads to, and the move."""
        system, owner = self._system[t], self._owner[t]
        best, chosen = self._seconds * (1 - 1e-9), (system, owner)
        self._take(t)
        for other, rank in self._moves(t):
            if (other, rank) == (system, owner) or not self._put(t, other, rank):
                continue
            if self._seconds < best:
                best, chosen = self._seconds, (other, self._owner[t])
            self._take(t)
        assert self._put(t, system, owner)
        return best, chosen

    def _move(self, t: int, to: tuple[str, int]) -> bool:
        """Moves a table, and returns whether it was not there already."""
        if to == (self._system[t], self._owner[t]):
            return False
        self._take(t)
        assert self._put(t, *to)
        return True

    def _moves(self, t: int) -> Iterator[tuple[str, int | None]]:
        for system in self._allowed[t]:
            if system != TABLE_WISE:
                yield system, None
            elif self._ranks <= ALL_RANKS:
                yield from ((system, rank) for rank in range(self._ranks))
            else:
                yield from {(system, int(self._loads_KW[k].argmin())) for k in (2, 3)}

    def _swap(self) -> bool:
        """Lets tables on the busiest ranks change places with others."""
        whole = [t for t in self._order if self._system[t] == TABLE_WISE]
        if not whole or len(whole) > 64:
            return False
        for a in whole:
            for b in whole:
                first, second = self._owner[a], self._owner[b]
                if first >= second:
                    continue
                before = self._seconds
                self._take(a)
                self._take(b)
                if self._put(a, TABLE_WISE, second):
                    if self._put(b, TABLE_WISE, first):
                        if self._seconds < before * (1 - 1e-9):
                            return True
                        self._take(b)
                    self._take(a)
                assert self._put(a, TABLE_WISE, first) and self._put(b, TABLE_WISE, second)
        return False

    def result(self) -> Assignment:
        """Returns the choice as it is now."""
        owners = (
            o if s == TABLE_WISE else 0 for s, o in zip(self._system, self._owner, strict=True)
        )
        return Assignment(tuple(self._system), tuple(owners), self._seconds)
