"""The search for a plan, by the cost model: the shortest step that fits into memory.

Per table fused or stock (``assign``); then all that is left to decide about fused tables
(``refine``); both for one group of all ranks and for each size of groups that is allowed.  No
randomness and no clock: equal input, equal plan.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from fusedrec_torchrec.codecs.options import Codecs
from fusedrec_torchrec.planner.cost.cluster import GB, ClusterConfig
from fusedrec_torchrec.planner.cost.memory import buffer_bytes
from fusedrec_torchrec.planner.cost.step import Groups
from fusedrec_torchrec.planner.cost.table_load import TableLoad
from fusedrec_torchrec.planner.search.assign import Assignment, NoRoomError, assign, to_mix
from fusedrec_torchrec.planner.search.decision import Decision
from fusedrec_torchrec.planner.search.owners import column_splits
from fusedrec_torchrec.planner.search.prices import Prices
from fusedrec_torchrec.planner.search.refine import WORTH, better_mode, finish, polish
from fusedrec_torchrec.planner.search.search_config import GroupsConfig, SearchConfig
from fusedrec_torchrec.sharding.sharding_type import (
    FUSED,
    FUSED_COLUMN_WISE,
    FUSED_TYPES,
    OWNER_POOLED,
)

__all__ = ["again", "alike", "decide", "groups_of"]

CLOSE, FINISHED = 1.5, 2  # those close to the best are improved, so many of them in all detail


def decide(
    tables: Sequence[TableLoad],
    batch: int,
    cluster: ClusterConfig,
    search: SearchConfig | None = None,
    unfit: Sequence[str] = (),
    progress: Callable[[str], None] = lambda _: None,
) -> Decision:
    """Returns the best plan that the search finds.

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
            plan = _decide_for(tables, batch, cluster, search, allowed, groups, layout)
        except NoRoomError as error:
            problem = problem or error
            continue
        if best is None or plan.seconds < best.seconds * (1 - WORTH):
            best = plan
    if best is None:
        assert problem is not None
        raise problem
    return best


def again(
    decision: Decision, search: SearchConfig, cluster: ClusterConfig | None = None
) -> Decision:
    """Returns a plan with the same shardings of tables, everything else decided again."""
    plain = replace(
        decision,
        cluster=cluster or decision.cluster,
        ranges=None,
        hot={},
        exact_counts=search.input_dist == "exact_counts",
        codecs=Codecs(),
    )
    return finish(plain, search)


def alike(decision: Decision, system: Any, search: SearchConfig) -> Decision | None:
    """Returns the plan that shards all tables in one way; None if they cannot be."""
    one = replace(search, systems=[system], tables={}, groups=GroupsConfig())
    try:
        return decide(decision.tables, decision.batch, decision.cluster, one)
    except ValueError:
        return None


def _allowed(
    tables: Sequence[TableLoad], search: SearchConfig, unfit: Sequence[str]
) -> list[list[str]]:
    """Returns the shardings that each table may have.

    Raises:
        ValueError: the search names no table, or leaves one without a sharding.
    """
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
        left = [s for s in given if s not in FUSED_TYPES or table.name not in unfit]
        if not left:
            raise ValueError(
                f"table {table.name!r} may only be {' or '.join(given)}, which it cannot: columns "
                "must be a multiple of 4, weights float32 or float16, and the optimizer one that "
                "fused tables have; allow another sharding of it in search.tables"
            )
        if not (table.pooled and table.can_be_owned):
            left = [s for s in left if s not in OWNER_POOLED]
        if not left:
            raise ValueError(
                f"table {table.name!r} may only be {' or '.join(given)}, which it cannot: owners "
                "pool bags, not sequences, features that are processed or tables with hot rows; "
                f"allow {FUSED} or another sharding of it in search.tables"
            )
        allowed.append(left)
    return allowed


def groups_of(cluster: ClusterConfig, search: GroupsConfig) -> list[tuple[Groups, str]]:
    """Returns one group of all ranks and what else is allowed, with the layout of each."""
    ranks, node = cluster.ranks, cluster.local_ranks
    choices = [(Groups(ranks), "replicas_adjacent")]
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
        local = max(node * size // ranks, 1)
        replicas_adjacent = Groups(size, number, local, min(number, node), *sync)
        local = min(size, node)
        groups_adjacent = Groups(size, number, local, max(node // local, 1), *sync)
        choices.append((replicas_adjacent, "replicas_adjacent"))
        choices.append((groups_adjacent, "groups_adjacent"))
    return choices


def _decide_for(
    tables: Sequence[TableLoad],
    batch: int,
    cluster: ClusterConfig,
    search: SearchConfig,
    allowed: list[list[str]],
    groups: Groups,
    layout: str,
) -> Decision:
    """Returns the best plan for these groups of ranks."""
    on_host = _spill(tables, batch, cluster, groups.size)
    allowed = _possible(allowed, tables, groups, on_host)
    systems = list(dict.fromkeys(s for options in allowed for s in options))
    exact = search.input_dist == "exact_counts"
    prices = Prices(tables, batch, cluster, groups, systems, on_host, exact)
    in_device = [
        replace(table, rows=0) if host else table
        for table, host in zip(tables, on_host, strict=True)
    ]
    room = cluster.memory * GB
    # Rows will be balanced later; until then popular ones are taken to be anywhere.
    balanced = search.row_ranges == "balanced"
    spread = tuple(replace(table, places=None) if balanced else table for table in tables)

    def plain(assignment: Assignment) -> Decision:
        decision = Decision(
            tables=spread,
            batch=batch,
            cluster=cluster,
            groups=groups,
            layout=layout,
            systems=assignment.systems,
            owners=assignment.owners,
            on_host=tuple(on_host),
            exact_counts=exact,
        )
        return better_mode(decision, search)

    def finished(decision: Decision) -> Decision:
        return finish(replace(decision, tables=tuple(tables)), search)

    alike, mixes = [], []
    for assignment in assign(in_device, allowed, prices, batch, room):
        if assignment.is_alike:
            only = [[system] for system in assignment.systems]
            alike.append(polish(plain(assignment), only))
        else:
            mixes.append(plain(assignment))
    # Plans without a mix are all looked at to the end: what is chosen is never longer than them.
    least = min(decision.seconds for decision in (*alike, *mixes))
    close = [decision for decision in (*mixes, *alike) if decision.seconds <= CLOSE * least]
    polished = {(d.systems, d.owners): d for d in (polish(d, to_mix(allowed)) for d in close)}
    best = sorted(polished.values(), key=lambda decision: decision.seconds)[:FINISHED]
    best = [polish(decision, to_mix(allowed), in_pairs=True) for decision in best]
    return min(map(finished, (*alike, *best)), key=lambda decision: decision.seconds)


def _possible(
    allowed: list[list[str]],
    tables: Sequence[TableLoad],
    groups: Groups,
    on_host: Sequence[bool],
) -> list[list[str]]:
    """Returns the shardings of each table that the ranks of a group can have.

    Columns must be enough for all ranks, and tables in host memory are divided among all hosts.  In
    2D no table is data-parallel, and gradients are shared of fused tables only.
    """
    left = []
    for table, given, host in zip(tables, allowed, on_host, strict=True):
        can = set(given)
        if host:
            can -= {"table_wise", "data_parallel", *OWNER_POOLED}
        if table.dim % (4 * groups.size):
            can.discard("column_wise")
        if not column_splits(table.dim, groups.size):
            can.discard(FUSED_COLUMN_WISE)
        if groups.number > 1:
            can.discard("data_parallel")
            can &= set(FUSED_TYPES) if groups.sync == "gradients" else can
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
    """Returns which tables go to host memory if devices are full: the least used bytes first."""
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
