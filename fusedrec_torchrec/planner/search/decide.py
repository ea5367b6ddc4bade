"""The decisions of a plan, by the cost model: the shortest step that fits into memory.

Per table fused or stock (``assign``); then, for the fused tables, hot rows (``replicate``), ranges
of rows (``row_ranges``), single-shot or exact counts, codecs; all of it for one group of all ranks
and for each size of groups that is allowed.  No randomness and no clock: equal input, equal plan.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

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
from fusedrec_torchrec.planner.cost.row_ranges import balanced_ranges
from fusedrec_torchrec.planner.cost.step import (
    Groups,
    HotUse,
    Step,
    fused_step,
    stock_step,
    with_sync,
)
from fusedrec_torchrec.planner.cost.table_load import TableLoad
from fusedrec_torchrec.planner.search.assign import (
    ALL_RANKS,
    MANY_STARTS,
    NoRoomError,
    Prices,
    assign,
)
from fusedrec_torchrec.planner.search.replicate import Ranking, finer, thresholds
from fusedrec_torchrec.planner.search.search_config import GroupsConfig, SearchConfig
from fusedrec_torchrec.sharding.sharding_type import FUSED

__all__ = ["Decision", "again", "alike", "decide", "groups_of"]

MB = 1e6
CANDIDATES = 8  # assignments of which the exact price is looked at
CLOSE, FINISHED = 1.5, 2  # those close to the best are improved, so many of them in all detail
RANGES_WORTH = 1e-2  # even ranges are easier to read
WORTH = 1e-3  # what a finer plan must save to be preferred to a plainer one
Hot = Mapping[str, NDArray[np.int64]]


@dataclass(frozen=True)
class Decision:
    """A plan and its price.

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
        """Of all groups."""
        return self.groups.size * self.groups.number

    def places_of(self, system: str) -> list[int]:
        """Numbers of the tables with this sharding."""
        return [t for t, each in enumerate(self.systems) if each == system]

    def fused_ranges(self) -> list[NDArray[np.int64]] | None:
        if self.ranges is None:
            return None
        return [self.ranges[t] for t in self.places_of(FUSED)]

    def hot_use(self) -> HotUse | None:
        if not self.hot:
            return None
        ids = [self.hot.get(self.tables[t].name, _NONE) for t in self.places_of(FUSED)]
        return HotUse(np.array([len(each) for each in ids]), self.hot_every, ids)

    def fused_step(self, tables: Sequence[TableLoad], hot: HotUse | None) -> Step:
        """Of the fused tables, with these hot rows."""
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
    def steps(self) -> list[Step]:
        """One for each sharding that is in use."""
        found = []
        for system in dict.fromkeys(self.systems):
            places = self.places_of(system)
            tables = [self.tables[t] for t in places]
            if system == FUSED:
                step = self.fused_step(tables, self.hot_use())
                ranges = self.fused_ranges()
                found.append(with_sync(step, tables, self.batch, self.groups, ranges))
                continue
            for pooled in (True, False):
                same = [t for t in places if self.tables[t].pooled == pooled]
                if same:
                    loads = [self.tables[t] for t in same]
                    owners = [self.owners[t] for t in same]
                    hosted = [self.on_host[t] for t in same]
                    step = stock_step(system, loads, self.batch, self.groups.size, owners, hosted)
                    whole = [
                        np.where(np.arange(self.groups.size + 1) > owner, table.rows, 0)
                        for table, owner in zip(loads, owners, strict=True)
                    ]
                    ranges = whole if system == "table_wise" else None
                    found.append(with_sync(step, loads, self.batch, self.groups, ranges))
        return found

    @cached_property
    def seconds(self) -> float:
        """Of a step."""
        return sum(step.seconds(self.cluster) for step in self.steps)

    @property
    def bytes_sent(self) -> float:
        """By all ranks in a step."""
        return sum(step.bytes_sent for step in self.steps) * self.groups.number

    def placement(self, t: int) -> Placement:
        ranges = self.ranges[t] if self.ranges and self.systems[t] == FUSED else None
        return Placement(self.systems[t], self.owners[t], ranges)

    @cached_property
    def memory_W(self) -> NDArray[np.float64]:
        """Bytes on the devices of a group's ranks."""
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


_NONE = np.empty(0, np.int64)


def decide(
    tables: Sequence[TableLoad],
    batch: int,
    cluster: ClusterConfig,
    search: SearchConfig | None = None,
    unfit: Sequence[str] = (),
    progress: Callable[[str], None] = lambda _: None,
) -> Decision:
    """The best plan that the search finds.

    Args:
        tables: of the model.
        batch: samples of a rank.
        cluster: to plan for.
        search: what may be decided.
        unfit: tables that cannot be fused.
        progress: is told what is being looked at.

    Raises:
        ValueError: tables do not fit into memory, or settings contradict each other.
    """
    search = search or SearchConfig()
    if not tables:
        raise ValueError("there are no tables to plan")
    allowed = _allowed(tables, search, unfit)
    best: Decision | None = None
    problem: NoRoomError | None = None
    for groups, layout in groups_of(cluster, search.groups):
        progress(f"groups of {groups.size}" if groups.number > 1 else "one group")
        try:
            found = _decide_for(tables, batch, cluster, search, allowed, groups, layout)
        except NoRoomError as error:
            problem = problem or error
            continue
        if best is None or found.seconds < best.seconds * (1 - WORTH):
            best = found
    if best is None:
        assert problem is not None
        raise problem
    return best


def again(
    decision: Decision, search: SearchConfig, cluster: ClusterConfig | None = None
) -> Decision:
    """The same shardings of tables, everything else decided again."""
    plain = replace(
        decision,
        cluster=cluster or decision.cluster,
        ranges=None,
        hot={},
        exact_counts=search.input_dist == "exact_counts",
        codecs=Codecs(),
    )
    return _finish(plain, search)


def alike(decision: Decision, system: Any, search: SearchConfig) -> Decision | None:
    """All tables sharded in one way; None if they cannot be."""
    one = replace(search, systems=[system], tables={}, groups=GroupsConfig())
    try:
        return decide(decision.tables, decision.batch, decision.cluster, one)
    except ValueError:
        return None


def _allowed(
    tables: Sequence[TableLoad], search: SearchConfig, unfit: Sequence[str]
) -> list[list[str]]:
    names = {table.name for table in tables}
    for name in search.tables:
        if name not in names:
            raise ValueError(
                f"search.tables names {name!r}, which is no table; there are "
                f"{', '.join(sorted(names)[:20])}"
            )
    allowed = []
    for table in tables:
        given: list[str] = list(search.tables.get(table.name, search.systems))
        left = [s for s in given if s != FUSED or table.name not in unfit]
        if not left:
            raise ValueError(
                f"table {table.name!r} may only be {FUSED}, which it cannot: columns must be a "
                "multiple of 4, weights float32 or float16, and the optimizer one that "
                "fused tables have; allow another sharding of it in search.tables"
            )
        allowed.append(left)
    return allowed


def groups_of(cluster: ClusterConfig, search: GroupsConfig) -> list[tuple[Groups, str]]:
    """One group of all ranks, and what else is allowed."""
    ranks, node = cluster.ranks, cluster.local_ranks
    found = [(Groups(ranks), "replicas_adjacent")]
    wanted = search.sizes
    sizes = [n for n in range(1, ranks) if ranks % n == 0]
    if wanted != "all":
        for size in wanted:
            if ranks % size:
                raise ValueError(
                    f"search.groups.sizes has {size}, must divide the cluster's {ranks} ranks"
                )
        sizes = [n for n in sizes if n in wanted]
    for size in sizes:
        number = ranks // size
        sync = (search.sync, search.sync_every)
        together = max(node * size // ranks, 1)
        apart = Groups(size, number, together, min(number, node), *sync)
        near = min(size, node)
        adjacent = Groups(size, number, near, max(node // near, 1), *sync)
        found += [(apart, "replicas_adjacent"), (adjacent, "groups_adjacent")]
    return found


def _decide_for(
    tables: Sequence[TableLoad],
    batch: int,
    cluster: ClusterConfig,
    search: SearchConfig,
    allowed: list[list[str]],
    groups: Groups,
    layout: str,
) -> Decision:
    on_host = _spill(tables, batch, cluster, groups.size)
    allowed = _possible(allowed, tables, groups, on_host)
    systems = list(dict.fromkeys(s for each in allowed for s in each))
    exact = search.input_dist == "exact_counts"
    prices = Prices(tables, batch, cluster, groups, systems, on_host, exact)
    in_device = [
        replace(table, rows=0) if host else table
        for table, host in zip(tables, on_host, strict=True)
    ]
    room = cluster.memory * GB
    candidates = [
        _better_mode(
            Decision(
                tables=tuple(tables),
                batch=batch,
                cluster=cluster,
                groups=groups,
                layout=layout,
                systems=each.systems,
                owners=each.owners,
                on_host=tuple(on_host),
                exact_counts=exact,
            ),
            search,
        )
        for each in assign(in_device, allowed, prices, batch, room)[:CANDIDATES]
    ]
    least = min(decision.seconds for decision in candidates)
    close = [decision for decision in candidates if decision.seconds <= CLOSE * least]
    polished = {each.systems + each.owners: each for each in (_polish(d, allowed) for d in close)}
    best = sorted(polished.values(), key=lambda decision: decision.seconds)[:FINISHED]
    return min((_finish(each, search) for each in best), key=lambda decision: decision.seconds)


def _finish(plain: Decision, search: SearchConfig) -> Decision:
    """Decides about the fused tables of a plan."""
    if FUSED not in plain.systems:
        return plain
    best = _better_mode(plain, search)
    if search.row_ranges == "balanced":
        best = _better_ranges(best)
    if plain.groups.number == 1 and search.hot.memory:
        best = _better_hot(best, search)
    return _better_codecs(_better_mode(best, search), search)


def _polish(plain: Decision, allowed: list[list[str]]) -> Decision:
    """Moves of single tables at their exact price, which knows of rows that cannot be divided."""
    if len(plain.tables) > MANY_STARTS:
        return plain
    best = plain
    ranks = range(plain.groups.size)
    improved = True
    while improved:
        improved = False
        for t, options in enumerate(allowed):
            for system in options:
                for owner in ranks if system == "table_wise" and len(ranks) <= ALL_RANKS else [0]:
                    systems = (*best.systems[:t], system, *best.systems[t + 1 :])
                    owners = (*best.owners[:t], owner, *best.owners[t + 1 :])
                    moved = replace(best, systems=systems, owners=owners)
                    if moved.seconds < best.seconds * (1 - 1e-6) and _fits(moved):
                        best, improved = moved, True
    return best


def _possible(
    allowed: list[list[str]],
    tables: Sequence[TableLoad],
    groups: Groups,
    on_host: Sequence[bool],
) -> list[list[str]]:
    """Shardings that the ranks of a group can have.

    Columns must be enough for all ranks, and tables in host memory are divided among all hosts.  In
    2D no table is data-parallel, and gradients are shared of fused tables only.
    """
    left = []
    for table, given, host in zip(tables, allowed, on_host, strict=True):
        can = set(given)
        if host:
            can -= {"table_wise", "data_parallel"}
        if table.dim % (4 * groups.size):
            can.discard("column_wise")
        if groups.number > 1:
            can.discard("data_parallel")
            can &= {FUSED} if groups.sync == "gradients" else can
        if not can:
            raise NoRoomError(
                f"table {table.name!r} with {table.dim} columns cannot be "
                f"{' or '.join(given)} on {groups.size} ranks"
                + (", in host memory, as devices are full" if host else "")
                + (f" in groups that sync {groups.sync}" if groups.number > 1 else "")
            )
        left.append([s for s in given if s in can])
    return left


def _spill(
    tables: Sequence[TableLoad], batch: int, cluster: ClusterConfig, ranks: int
) -> list[bool]:
    """Tables that go to host memory, as devices have no room: the least used bytes first."""
    on_host = [False] * len(tables)
    if cluster.device != "cuda":
        return on_host
    buffers = sum(buffer_bytes(table, FUSED, batch, ranks) for table in tables)
    too_much = sum(table.size for table in tables) / ranks + buffers - cluster.memory * GB
    free = cluster.host_memory * GB
    order = sorted(
        range(len(tables)),
        key=lambda t: (tables[t].unique(batch) * tables[t].dim / max(tables[t].size, 1), t),
    )
    for t in order:
        share = tables[t].size / ranks
        if too_much <= 0:
            break
        if share <= free:
            on_host[t] = True
            free -= share
            too_much -= share
    return on_host


def _better_mode(decision: Decision, search: SearchConfig) -> Decision:
    """With ids as they travel faster."""
    if search.input_dist != "auto":
        return decision
    single, exact = (replace(decision, exact_counts=each) for each in (False, True))
    return exact if exact.seconds < single.seconds * (1 - WORTH) else single


def _fits(decision: Decision) -> bool:
    return bool(decision.memory_W.max() <= decision.cluster.memory * GB)


def _with_ranges(decision: Decision, evenness: float) -> Decision:
    places = decision.places_of(FUSED)
    fused = [decision.tables[t] for t in places]
    ranges = balanced_ranges(
        fused, decision.batch, decision.groups.size, decision.hot_use(), evenness
    )
    by_table = dict(zip(places, ranges, strict=True))
    full = tuple(by_table.get(t, _NONE) for t in range(len(decision.tables)))
    return replace(decision, ranges=full)


def _better_ranges(plain: Decision) -> Decision:
    """Ranges of equal load, if that pays and fits; else ranges between that and equal length."""
    for evenness in (0.0, 0.5, 0.75):
        balanced = _with_ranges(plain, evenness)
        if balanced.seconds >= plain.seconds * (1 - RANGES_WORTH):
            return plain
        if _fits(balanced):
            return balanced
    return plain


def _better_hot(cold: Decision, search: SearchConfig) -> Decision:
    """Hot rows, if that pays: as many of the most used rows as make the step shortest."""
    places = [t for t in cold.places_of(FUSED) if not cold.on_host[t]]
    tables = [cold.tables[t] for t in places]
    ranking = Ranking([t for t in tables if t.can_be_hot], cold.batch)
    if not len(ranking):
        return cold
    room = cold.cluster.memory * GB - float(cold.memory_W.max())
    budget = min(search.hot.memory * MB, room)
    # How many rows is found with rows spread evenly; where they are comes after.
    spread = tuple(replace(table, places=None) for table in cold.tables)
    flat = replace(cold, tables=spread, ranges=None)
    fused = [spread[t] for t in cold.places_of(FUSED)]
    names = [table.name for table in fused]

    def seconds(rows: int) -> float:
        counts = ranking.counts(rows)
        hot = HotUse(np.array([counts.get(n, 0) for n in names]), search.hot.sync_every)
        return flat.fused_step(fused, hot).seconds(cold.cluster)

    least, best = flat.fused_step(fused, None).seconds(cold.cluster), 0
    at, tried = 0.0, thresholds(tables, cold.batch)
    for refined in (False, True):
        for threshold in finer(tried, at) if refined else tried:
            rows = ranking.rows(threshold, budget)
            if rows and (found := seconds(rows)) < least * (1 - WORTH / 10):
                least, best, at = found, rows, threshold
        if not best:
            return cold
    warm = replace(cold, hot=ranking.ids(best), hot_every=search.hot.sync_every)
    if cold.ranges is not None:
        warm = _with_ranges(warm, 0.0)
    return warm if _fits(warm) and warm.seconds < cold.seconds * (1 - WORTH) else cold


def _better_codecs(exact: Decision, search: SearchConfig) -> Decision:
    options = [replace(exact, codecs=codecs) for codecs in search.allowed_codecs()]
    return min([exact, *options], key=lambda decision: decision.seconds)
