"""What is decided about a plan once every table has its sharding.

For the fused tables: ids by single shot or exact counts, ranges of rows (``cost.row_ranges``), hot
rows (``replicate``) and codecs.  Each is kept only if it makes the step shorter, and fits.
"""

from dataclasses import replace
from itertools import combinations, product

import numpy as np

from fusedrec_torchrec.planner.cost.cluster import GB, MB
from fusedrec_torchrec.planner.cost.row_ranges import balanced_ranges
from fusedrec_torchrec.planner.cost.step import NO_ROWS, HotUse, Step
from fusedrec_torchrec.planner.search.assign import MANY_STARTS
from fusedrec_torchrec.planner.search.decision import Decision
from fusedrec_torchrec.planner.search.owners import neighbours
from fusedrec_torchrec.planner.search.replicate import (
    Ranking,
    rows_above_best_threshold,
    thresholds,
)
from fusedrec_torchrec.planner.search.search_config import SearchConfig
from fusedrec_torchrec.sharding.sharding_type import FUSED

__all__ = ["WORTH", "better_mode", "finish", "polish"]

RANGES_WORTH = 1e-2  # even ranges are easier to read
MOST_WAYS = 60  # of all tables, so that two may be moved at a time: some thousand plans
WORTH = 1e-3  # what a finer plan must save to be preferred to a plainer one


def polish(plain: Decision, allowed: list[list[str]], in_pairs: bool = False) -> Decision:
    """Returns the plan after moves of tables that make the step shorter.

    Their price is the exact one, which knows of rows that cannot be divided, and of ranks that are
    busy with different things.

    Args:
        plain: to begin with.
        allowed: shardings of each table.
        in_pairs: whether two tables may be moved at a time, if there are few of them.
    """
    if len(plain.tables) > MANY_STARTS:
        return plain
    ways = sum(len(_ways(plain, t, allowed)) for t in range(len(allowed)))
    sizes = (1, 2) if in_pairs and ways <= MOST_WAYS else (1,)
    best: Decision = plain
    while True:
        moved = next((m for size in sizes if (m := _moved(best, allowed, size)) is not best), best)
        if moved is best:
            return best
        best = moved


def _moved(plain: Decision, allowed: list[list[str]], size: int) -> Decision:
    """Returns the plan after moves of so many tables at a time; the same if none is shorter."""
    best = plain
    for numbers in combinations(range(len(allowed)), size):
        for ways_of_tables in product(*(_ways(plain, t, allowed) for t in numbers)):
            systems, owners = list(best.systems), list(best.owners)
            for t, (system, own) in zip(numbers, ways_of_tables, strict=True):
                systems[t], owners[t] = system, own
            moved = replace(best, systems=tuple(systems), owners=tuple(owners))
            if moved.seconds < best.seconds * (1 - 1e-6) and moved.fits:
                best = moved
    return best


def _ways(plain: Decision, t: int, allowed: list[list[str]]) -> list[tuple[str, tuple[int, ...]]]:
    """Returns how a table can be sharded otherwise: its sharding, and who owns columns of it."""
    return [
        (system, own)
        for system in allowed[t]
        for own in neighbours(system, plain.tables[t], plain.groups.size)
        if (system, own) != (plain.systems[t], plain.owners[t])
    ]


def finish(plain: Decision, search: SearchConfig) -> Decision:
    """Returns the plan with everything decided about its fused tables."""
    if not plain.fused_numbers:
        return plain
    best = better_mode(plain, search)
    by_rows = FUSED in plain.systems
    if by_rows and search.row_ranges == "balanced":
        best = _better_ranges(best)
    if by_rows and plain.groups.number == 1 and search.hot.memory:
        best = _better_hot(best, search)
    return _better_codecs(better_mode(best, search), search)


def better_mode(decision: Decision, search: SearchConfig) -> Decision:
    """Returns the plan with ids travelling in the faster of two ways."""
    if search.input_dist != "auto":
        return decision
    single, exact = (replace(decision, exact_counts=exact) for exact in (False, True))
    return exact if exact.seconds < single.seconds * (1 - WORTH) else single


def _with_ranges(decision: Decision, evenness: float) -> Decision:
    """Returns the plan with ranges of equal load, as far as ``evenness`` leaves room for it."""
    numbers = decision.numbers_of(FUSED)
    fused = [decision.tables[t] for t in numbers]
    hot = decision.hot_use()
    if hot is not None:  # of the tables that are split by rows
        mine = [decision.fused_numbers.index(t) for t in numbers]
        hot = HotUse(hot.rows_T[mine], hot.sync_every, [hot.of(t) for t in mine])
    load_W = np.zeros(decision.groups.size)  # of whole tables, which rows can make up for
    for table, own in zip(decision.tables, decision.owners, strict=True):
        if own and table.pooled:
            load_W[list(own)] += table.distinct_bags(decision.batch).bags * table.dim / len(own)
    ranges = balanced_ranges(fused, decision.batch, decision.groups.size, hot, evenness, load_W)
    by_table = dict(zip(numbers, ranges, strict=True))
    full = tuple(by_table.get(t, NO_ROWS) for t in range(len(decision.tables)))
    return replace(decision, ranges=full)


def _better_ranges(plain: Decision) -> Decision:
    """Returns the plan with ranges of equal load, if that pays.

    If they do not fit, it takes ranges between that and equal length.
    """
    for evenness in (0.0, 0.5, 0.75):
        balanced = _with_ranges(plain, evenness)
        if balanced.seconds >= plain.seconds * (1 - RANGES_WORTH):
            return plain
        if balanced.fits:
            return balanced
    return plain


def _better_hot(cold: Decision, search: SearchConfig) -> Decision:
    """Returns the plan with hot rows, if that pays."""
    numbers = [t for t in cold.numbers_of(FUSED) if not cold.on_host[t]]
    tables = [cold.tables[t] for t in numbers]
    ranking = Ranking([t for t in tables if t.can_be_hot], cold.batch)
    if not len(ranking):
        return cold
    room = cold.cluster.memory * GB - float(cold.memory_W.max())
    budget = min(search.hot.memory * MB, room)
    # How many rows: as if they were spread evenly; where they are comes after.
    spread = tuple(replace(table, places=None) for table in cold.tables)
    flat = replace(cold, tables=spread, ranges=None)
    fused = [spread[t] for t in cold.fused_numbers]
    names = [table.name for table in fused]

    def step(rows: int) -> Step:
        counts = ranking.counts(rows)
        rows_T = np.array([counts.get(name, 0) for name in names])
        hot = HotUse(rows_T, search.hot.sync_every) if rows else None
        return flat.fused_step(fused, hot)

    tried = thresholds(tables, cold.batch)
    best = rows_above_best_threshold(ranking, tried, budget, step, cold.cluster)
    if not best:
        return cold
    warm = replace(cold, hot=ranking.ids(best), hot_every=search.hot.sync_every)
    if cold.ranges is not None:
        warm = _with_ranges(warm, 0.0)
    return warm if warm.fits and warm.seconds < cold.seconds * (1 - WORTH) else cold


def _better_codecs(exact: Decision, search: SearchConfig) -> Decision:
    """Returns the plan with the codecs that make the step shortest."""
    options = [replace(exact, codecs=codecs) for codecs in search.allowed_codecs()]
    return min([exact, *options], key=lambda decision: decision.seconds)
