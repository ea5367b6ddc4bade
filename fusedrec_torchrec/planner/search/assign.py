"""Which table is sharded how: fused, or in one of TorchRec's ways, and on which ranks.

An exchange has a price for being used at all (Python, latencies), and a sharding one for each
table; all fused shardings are one exchange.  The prices of tables add up, but for tables whose rows
are all on one rank or a few, where the busiest rank counts (``prices``).  So for each set of
shardings that could be in use: every table takes its cheapest, whole tables and columns go to the
ranks with the least to do, the largest first, and then tables move, one by one, as long as that
makes the step shorter.

Every sharding that all tables can have is also taken alone, and that plan is handed on whatever it
costs here: what comes afterwards decides at exact prices, and no mix of shardings is worth more
than the best plan without one.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations

import numpy as np
from numpy.typing import NDArray

from fusedrec_torchrec.planner.cost.memory import buffer_bytes, column_bytes, owner_bytes
from fusedrec_torchrec.planner.cost.table_load import TableLoad
from fusedrec_torchrec.planner.search.owners import ALL_RANKS, WHOLE, column_splits
from fusedrec_torchrec.planner.search.prices import LOADS, OWNED, Prices, owned_as
from fusedrec_torchrec.sharding.sharding_type import (
    FUSED,
    FUSED_COLUMN_WISE,
    FUSED_TABLE_WISE,
    OWNER_POOLED,
)

__all__ = ["Assignment", "NoRoomError", "assign", "to_mix"]

DOES_THE_SAME = {"table_wise": FUSED_TABLE_WISE, "column_wise": FUSED_COLUMN_WISE}
MOST_MIXES = 8  # that are handed on
MOST_SWEEPS = 20
FEW, MANY_STARTS = 12, 40  # tables
LEAST_GAIN = 2e-3  # share of the step that a sweep over many tables must save to be repeated
FAIR = 1.25  # times the mean load of a rank are what a table may begin with on one
MOST_SWAPPED = 64  # tables
Floats = NDArray[np.float64]
Place = tuple[str, tuple[int, ...]]  # a sharding, and ranks that have all rows


class NoRoomError(ValueError):
    """Is raised if tables do not fit into memory; the text says which and by how much."""


@dataclass(frozen=True)
class Assignment:
    """Says which sharding every table has.

    Attributes:
        systems: sharding of each table.
        owners: ranks of each table that have all of its rows; none for tables split otherwise.
        seconds: of a step, if rows are balanced.
        is_alike: whether there was one sharding to choose from, the same for all tables.
    """

    systems: tuple[str, ...]
    owners: tuple[tuple[int, ...], ...]
    seconds: float
    is_alike: bool = False


Start = str | Assignment | None


def assign(
    tables: Sequence[TableLoad],
    allowed: Sequence[Sequence[str]],
    prices: Prices,
    batch: int,
    room: float,
) -> list[Assignment]:
    """Returns plans that shard all tables alike, then the shortest steps of mixes, in order.

    There is one plan for every sharding that all tables may have and that fits.

    Args:
        tables: to be sharded.
        allowed: shardings that each table may have.
        prices: of them.
        batch: samples of a rank.
        room: bytes of a rank.

    Raises:
        NoRoomError: there is none that fits.
    """
    problem: NoRoomError | None = None

    def searched(options: Sequence[Sequence[str]], chosen: Sequence[str], start: Start) -> None:
        nonlocal problem
        try:
            search = _Search(tables, options, prices, batch, room, chosen, start)
        except NoRoomError as error:
            problem = problem or error
            return
        search.improve()
        (alike if options is allowed else mixes).append(search.result())

    alike: list[Assignment] = []
    mixes: list[Assignment] = []
    for system in prices.of_use:
        if all(system in options for options in allowed):
            searched(allowed, (system,), None)
    mixed = to_mix(allowed)
    systems = _worth_mixing(mixed, prices)
    few = len(tables) <= MANY_STARTS
    for chosen in _subsets(systems):
        if not all(any(s in chosen for s in options) for options in mixed):
            continue
        # From where every table is at its cheapest; few tables also from where they are all alike.
        for start in (None, *chosen) if few else (None,):
            searched(mixed, chosen, start)
    shortest = min(alike, key=lambda plan: plan.seconds, default=None)
    if not few and shortest is not None and {*shortest.systems} < {*systems}:
        searched(mixed, systems, shortest)
    if not alike and not mixes:
        assert problem is not None
        raise problem
    different = {(mix.systems, mix.owners): mix for mix in mixes}  # prices differ by rounding
    in_order = sorted(different.values(), key=lambda mix: mix.seconds)
    return [*(replace(plan, is_alike=True) for plan in alike), *in_order[:MOST_MIXES]]


def to_mix(allowed: Sequence[Sequence[str]]) -> list[list[str]]:
    """Returns the shardings that tables may have where others have other ones.

    A stock sharding is not looked at there if a fused one does the same with fewer collectives and
    bytes.
    """
    return [[s for s in options if DOES_THE_SAME.get(s) not in options] for options in allowed]


def _worth_mixing(allowed: Sequence[Sequence[str]], prices: Prices) -> list[str]:
    """Returns the shardings to mix: of many tables, only those that are the cheapest of one.

    Splitting rows is among them, since it needs the least memory of a rank.
    """
    worth = {s for options in allowed for s in options}
    if len(allowed) > MANY_STARTS:
        price = {s: prices.balanced(s) for s in worth}
        cheapest = {min(options, key=lambda s: price[s][t]) for t, options in enumerate(allowed)}
        only = {options[0] for options in allowed if len(options) == 1}
        keep = {FUSED, *cheapest, *only, *(OWNER_POOLED if cheapest & {*OWNER_POOLED} else ())}
        worth &= keep
    return [s for s in prices.of_use if s in worth]


def _subsets(systems: Sequence[str]) -> Iterator[tuple[str, ...]]:
    """Yields sets of several shardings; those of tables that owners pool are always together."""
    kinds: list[tuple[str, ...]] = [(s,) for s in systems if s not in OWNER_POOLED]
    owned = tuple(s for s in systems if s in OWNER_POOLED)
    kinds += [owned] if owned else []
    for size in range(1, len(kinds) + 1):
        for chosen in combinations(kinds, size):
            sharding = tuple(s for kind in chosen for s in kind)
            if len(sharding) > 1:
                yield sharding


class _Search:
    """Holds a choice of systems for all tables, and moves single tables.

    It starts from where every table is at its cheapest, or at one sharding if it can be, or from an
    assignment.
    """

    def __init__(
        self,
        tables: Sequence[TableLoad],
        allowed: Sequence[Sequence[str]],
        prices: Prices,
        batch: int,
        room: float,
        chosen: Sequence[str],
        start: Start,
    ) -> None:
        self._tables, self._prices, self._room, self._batch = tables, prices, room, batch
        self._ranks = prices.ranks
        self._allowed = [[s for s in chosen if s in options] for options in allowed]
        self._loads = {kind: np.zeros((LOADS, self._ranks)) for kind in OWNED}
        self._used_W = np.zeros(self._ranks)
        self._place: list[Place] = [("", ())] * len(tables)
        self._count: Mapping[str, int] = dict.fromkeys(chosen, 0)
        self._sum = 0.0  # of prices that add up
        self._buffers = {
            s: np.array([buffer_bytes(t, s, batch, self._ranks) for t in tables]) for s in chosen
        }
        balanced = {s: prices.balanced(s) for s in chosen}
        self._order = sorted(range(len(tables)), key=lambda t: (-tables[t].size, t))
        if any(owned_as(s) for s in chosen):  # the most work first, which is hardest to place
            work = np.max([balanced[s] for s in chosen if owned_as(s)], axis=0)
            self._order = sorted(self._order, key=lambda t: -work[t])
        wishes = [
            sorted(options, key=lambda s: (s != start, balanced[s][t], s))
            for t, options in enumerate(self._allowed)
        ]
        self._fair = self._fair_shares([options[0] for options in wishes])
        for t in self._order:
            places: Iterable[Place] = (
                place for system in wishes[t] for place in self._first_places(t, system)
            )
            if isinstance(start, Assignment):
                places = [(start.systems[t], start.owners[t])]
            if not any(self._put(t, place) for place in places):
                self._no_room(t, wishes[t])

    def _no_room(self, t: int, options: Sequence[str]) -> None:
        need = min(sum(self._bytes(t, s, self._most_owners(t, s))) for s in options)
        left = self._room - (self._used_W.max() if FUSED in options else self._used_W.min())
        raise NoRoomError(
            f"table {self._tables[t].name!r} does not fit: with {' or '.join(options)} it needs "
            f"{need / 1e9:.3g} GB of a rank, {max(left, 0) / 1e9:.3g} of {self._room / 1e9:.3g} GB "
            f"are left, {(need - max(left, 0)) / 1e9:.3g} GB are missing; more ranks, more memory "
            "of the cluster, or a smaller table"
        )

    def _most_owners(self, t: int, system: str) -> int:
        return max(self._owners(t, system), default=1)

    def _bytes(self, t: int, system: str, owners: int) -> tuple[float, float]:
        """Returns the bytes of a table on each rank, and beside that on each of its owners."""
        table, buffers = self._tables[t], float(self._buffers[system][t])
        if owned_as(system):
            mine = owner_bytes(table, self._batch, self._ranks, system, owners)
            return buffers, column_bytes(table, owners) + mine
        whole = table.size if system == "data_parallel" else table.size / self._ranks
        return whole + buffers, 0.0

    def _fair_shares(self, wishes: Sequence[str]) -> dict[str, float]:
        """Returns, of each kind of owned tables, how busy a rank is if all are equally busy."""
        shares = {}
        for kind in OWNED:
            busy_T = self._prices.of_ranks(kind, self._prices.loads[kind])
            mine = np.array([owned_as(wish) == kind for wish in wishes])
            shares[kind] = float(busy_T[mine].sum()) / self._ranks
        return shares

    def _owners(self, t: int, system: str) -> tuple[int, ...]:
        """Returns how many owners a table can have in a sharding."""
        if system == FUSED_COLUMN_WISE:
            return column_splits(self._tables[t].dim, self._ranks)
        return (1,)

    def _busy_W(self) -> Floats:
        """Returns how busy each rank is with tables that it owns."""
        busy = [self._prices.of_ranks(kind, loads) for kind, loads in self._loads.items()]
        return np.asarray(np.sum(busy, axis=0))

    def _first_places(self, t: int, system: str) -> Iterator[Place]:
        """Yields the least busy ranks with room for a table, as few as make it a fair share.

        If no number of owners makes it one, those come first that make it smallest.
        """
        kind = owned_as(system)
        if kind is None:
            yield system, ()
            return
        choices = []
        for same in (s for s in self._allowed[t] if owned_as(s) == kind):
            for owners in self._owners(t, same):
                load_K1 = self._prices.load_of(kind, t, owners)[:, None]
                busy = float(self._prices.of_ranks(kind, load_K1)[0])
                too_busy = busy > FAIR * self._fair[kind]
                choices.append((busy if too_busy else 0.0, owners, same))
        for _, owners, same in sorted(choices):
            on_rank, on_owner = self._bytes(t, same, owners)
            room_W = self._used_W + on_rank + on_owner <= self._room
            if room_W.sum() >= owners:
                order = np.argsort(np.where(room_W, self._busy_W(), np.inf), kind="stable")
                yield same, tuple(sorted(order[:owners].tolist()))

    def _places(self, t: int, system: str) -> Iterator[Place]:
        """Yields ranks for a table: the least loaded ones, and if they are few all of them."""
        kind = owned_as(system)
        if kind is None:
            yield system, ()
            return
        busy_W = self._busy_W()
        for owners in self._owners(t, system):
            if owners == 1 and self._ranks <= ALL_RANKS:
                yield from ((system, (rank,)) for rank in range(self._ranks))
            else:
                loads = (busy_W, self._loads[kind][-2], self._loads[kind][-1])
                least = [np.argsort(load_W, kind="stable")[:owners] for load_W in loads]
                ranks = (tuple(sorted(order.tolist())) for order in least)
                yield from ((system, own) for own in dict.fromkeys(ranks))

    def _put(self, t: int, place: Place) -> bool:
        """Gives a table a sharding, and returns whether there was room for it."""
        system, own = place
        on_rank, on_owner = self._bytes(t, system, len(own))
        if self._used_W.max() + on_rank > self._room:
            return False
        kind, at = owned_as(system), list(own)
        if kind is not None:
            if (self._used_W[at] + on_rank + on_owner > self._room).any():
                return False
            self._used_W[at] += on_owner
            self._loads[kind][:, at] += self._prices.load_of(kind, t, len(at))[:, None]
        self._used_W += on_rank
        self._place[t] = place
        self._sum += float(self._prices.of_tables[system][t])
        self._sum += self._prices.of_first(system, self._count)
        self._count[system] += 1  # type: ignore[index]
        return True

    def _take(self, t: int) -> None:
        system, own = self._place[t]
        on_rank, on_owner = self._bytes(t, system, len(own))
        self._used_W -= on_rank
        kind, at = owned_as(system), list(own)
        if kind is not None:
            self._used_W[at] -= on_owner
            self._loads[kind][:, at] -= self._prices.load_of(kind, t, len(at))[:, None]
        self._sum -= float(self._prices.of_tables[system][t])
        self._count[system] -= 1  # type: ignore[index]
        self._sum -= self._prices.of_first(system, self._count)

    @property
    def _seconds(self) -> float:
        return self._sum + sum(
            self._prices.of_owned(kind, loads)
            for kind, loads in self._loads.items()
            if any(self._count.get(s) for s in OWNED[kind])
        )

    def improve(self) -> None:
        """Moves tables until no move helps: the best move first if tables are few."""
        few, many = len(self._tables) <= FEW, len(self._tables) > MANY_STARTS
        for _ in range(MOST_SWEEPS * (len(self._tables) if few else 1)):
            moved, before = False, self._seconds
            if few:
                gains = [self._best_move(t) for t in self._order]
                t, (_, chosen) = min(zip(self._order, gains, strict=True), key=lambda g: g[1][0])
                moved = self._move(t, chosen)
            else:
                for t in self._order:
                    moved |= self._move(t, self._best_move(t)[1])
            if not moved and not self._swap():
                return
            if many and self._seconds > before * (1 - LEAST_GAIN):
                return

    def _best_move(self, t: int) -> tuple[float, Place]:
        """Returns the shortest step that a move of one table leads to, and the move."""
        before = self._place[t]
        best, chosen = self._seconds * (1 - 1e-9), before
        self._take(t)
        for system in self._allowed[t]:
            for place in list(self._places(t, system)):
                if place == before or not self._put(t, place):
                    continue
                if self._seconds < best:
                    best, chosen = self._seconds, place
                self._take(t)
        assert self._put(t, before)
        return best, chosen

    def _move(self, t: int, to: Place) -> bool:
        """Moves a table, and returns whether it was not there already."""
        if to == self._place[t]:
            return False
        self._take(t)
        assert self._put(t, to)
        return True

    def _swap(self) -> bool:
        """Lets tables on the busiest ranks change places with others."""
        whole = [t for t in self._order if self._place[t][0] in WHOLE]
        if not whole or len(whole) > MOST_SWAPPED:
            return False
        for a in whole:
            for b in whole:
                (system, first), (other, second) = self._place[a], self._place[b]
                if first >= second:
                    continue
                before = self._seconds
                self._take(a)
                self._take(b)
                if self._put(a, (system, second)):
                    if self._put(b, (other, first)):
                        if self._seconds < before * (1 - 1e-9):
                            return True
                        self._take(b)
                    self._take(a)
                assert self._put(a, (system, first)) and self._put(b, (other, second))
        return False

    def result(self) -> Assignment:
        """Returns the choice as it is now."""
        systems, owners = zip(*self._place, strict=True)
        return Assignment(tuple(systems), tuple(owners), self._seconds)
