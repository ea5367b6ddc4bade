"""The cost model over many sizes of a cluster: how systems scale, weakly and strongly.

Systems: TorchRec's shardings, the best of table-wise, narrow columns, table-row-wise, row-wise
and column-wise at each size; hot rows without dedup, as in P2RES; dedup table by table, which saves
bytes and multiplies messages; the fused exchange; with hot rows; in groups (2D).  A step waits for
the busiest owner of sampled batches, and for the dense part of the model if the configuration has
one.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from fusedrec_torchrec.access.replication import cheapest
from fusedrec_torchrec.planner.config import SCALINGS, Scaling
from fusedrec_torchrec.planner.cost.cluster import GB, MB, ClusterConfig
from fusedrec_torchrec.planner.cost.memory import buffer_bytes, owner_bytes, replica_bytes
from fusedrec_torchrec.planner.cost.stages import HOT_SYNC
from fusedrec_torchrec.planner.cost.step import (
    STOCK_ID_BYTES,
    HotUse,
    Stage,
    Step,
    fused_step,
    stock_step,
    with_sync,
)
from fusedrec_torchrec.planner.cost.straggle import busiest_owner
from fusedrec_torchrec.planner.cost.table_load import NUMBER_BYTES, TableLoad
from fusedrec_torchrec.planner.planning import Planning
from fusedrec_torchrec.planner.search.decide import groups_of
from fusedrec_torchrec.planner.search.replicate import most_used_by_class, price, thresholds
from fusedrec_torchrec.sharding.sharding_type import FUSED

__all__ = ["SYSTEMS", "Point", "simulate"]

SYSTEMS = (
    "TorchRec",
    "hot rows, no dedup",
    "dedup by table",
    "fused",
    "fused + hot rows",
    "fused + 2D",
)
OWNER_STAGES = ("lookup", "rows", "gradients", "update", "lookup_on_host", "update_on_host")
ALL_IDS = "rows of all ids"
NARROW = 32  # columns of the narrowest column shards


@dataclass(frozen=True)
class Point:
    """Is a system on so many ranks.

    Attributes:
        system: one of ``SYSTEMS``.
        scaling: ``weak``, as many samples for each rank, or ``strong``, as many in all.
        ranks: of the cluster.
        batch: samples of a rank.
        seconds: of a step; None if the tables do not fit.
        bytes_sent: by a rank.
        busiest: load of the busiest owner, as a multiple of the mean.
        how: what was chosen: sharding, rows, groups.
    """

    system: str
    scaling: Scaling
    ranks: int
    batch: int
    seconds: float | None
    bytes_sent: float
    busiest: float
    how: str

    @property
    def throughput(self) -> float:
        """How many samples all ranks train in a second."""
        return self.ranks * self.batch / self.seconds if self.seconds else 0.0


def simulate(
    planning: Planning,
    ranks: Sequence[int],
    scalings: Sequence[Scaling] = SCALINGS,
    systems: Sequence[str] = SYSTEMS,
    batches: int = 8,
    seed: int = 0,
) -> Iterator[Point]:
    """Yields all systems on all sizes.

    Args:
        planning: tables, batch and cluster.
        ranks: sizes of the cluster.
        scalings: ``weak``, ``strong`` or both; the first size has the batch of the configuration.
        systems: to compare.
        batches: to sample for stragglers.
        seed: of the sample.
    """
    for scaling in scalings:
        for size in ranks:
            cluster = replace(planning.cluster, ranks=size)
            batch = planning.batch
            if scaling == "strong":
                batch = max(planning.batch * ranks[0] // size, 1)
            one = _OneSize(planning, cluster, batch, batches, seed)
            for system in systems:
                yield one.point(system, scaling)


@dataclass(frozen=True)
class _Run:
    """Is a step of a system, on the ranks of a group."""

    step: Step
    how: str
    busiest: float
    groups: int = 1
    hot: HotUse | None = None
    scaled: tuple[str, ...] = OWNER_STAGES  # stages whose busiest rank is that of sampled batches


class _OneSize:
    def __init__(
        self, planning: Planning, cluster: ClusterConfig, batch: int, batches: int, seed: int
    ) -> None:
        self._planning, self._cluster, self._batch = planning, cluster, batch
        self._tables: list[TableLoad] = [replace(t, places=None) for t in planning.loads]
        self._batches, self._seed = batches, seed
        self._known: dict[tuple[object, ...], float] = {}

    def point(self, system: str, scaling: Scaling) -> Point:
        runs = [run for run in self._runs(system) if self._seconds(run) is not None]
        cluster = self._cluster
        if not runs:
            return Point(
                system, scaling, cluster.ranks, self._batch, None, 0.0, 1.0, "does not fit"
            )
        best = min(runs, key=lambda run: self._seconds(run) or 0.0)
        return Point(
            system=system,
            scaling=scaling,
            ranks=cluster.ranks,
            batch=self._batch,
            seconds=self._seconds(best),
            bytes_sent=best.step.bytes_sent / best.step.ranks,
            busiest=best.busiest,
            how=best.how,
        )

    def _seconds(self, run: _Run) -> float | None:
        """Returns the seconds of a step with straggler and dense part; None if it does not fit."""
        if self._memory(run) > self._cluster.memory * GB:
            return None
        stages = [
            replace(stage, amount_W=stage.amount_W.mean(keepdims=True) * run.busiest)
            if stage.name in run.scaled
            else stage
            for stage in run.step.stages
        ]
        total = replace(run.step, stages=stages).seconds(self._cluster)
        dense = self._planning.config.dense
        reduced = self._cluster.all_reduce(dense.gradients_mb * MB) if dense.gradients_mb else 0.0
        return total + dense.milliseconds / 1e3 + reduced * (1 - dense.hidden)

    def _memory(self, run: _Run) -> float:
        """Returns the bytes of the fullest rank, if pieces are spread as well as they can be."""
        ranks, system = run.step.ranks, run.step.system
        sizes = [float(t.size) for t in self._tables]
        if system == "table_wise":
            pieces = self._tables if run.how == "table_wise" else _narrow(self._tables)
            sizes = [t.size + owner_bytes(t, self._batch, ranks) for t in pieces]
        size = max(sum(sizes) / ranks, max(sizes) if system == "table_wise" else 0.0)
        on_host = self._cluster.host_memory * GB if self._cluster.device == "cuda" else 0.0
        # Sums of bags are of all ranks, or of a node's share of the tables.
        share = self._cluster.ranks_per_node if system == "table_row_wise" else ranks
        buffers = sum(buffer_bytes(t, system, self._batch, share) for t in self._tables)
        if system == ALL_IDS:  # as fused, with a row for each id
            fused = sum(buffer_bytes(t, FUSED, self._batch, ranks) for t in self._tables)
            twice = sum((t.ids(self._batch) - t.unique(self._batch)) * t.dim for t in self._tables)
            buffers = fused + 4 * twice * NUMBER_BYTES
        return max(size - on_host, 0.0) + buffers + replica_bytes(self._tables, run.hot)

    def _runs(self, system: str) -> Iterator[_Run]:
        tables, batch, ranks = self._tables, self._batch, self._cluster.ranks
        if system == "TorchRec":
            narrow = _narrow(tables)
            step = stock_step("row_wise", tables, batch, ranks)
            # Sums of bags are the same on all ranks, whoever looked rows up.
            busiest = self._busiest(ranks, dedup=False)
            yield _Run(step, "row_wise", busiest, scaled=("lookup", "update"))
            if not any(table.dim % (4 * ranks) for table in tables):
                step = stock_step("column_wise", tables, batch, ranks)
                yield _Run(step, "column_wise", 1.0, scaled=())
            for how, whole in (("table_wise", tables), (f"columns of {NARROW}", narrow)):
                step = stock_step("table_wise", whole, batch, ranks)
                step = replace(step, tables=len(tables))
                work = next(stage for stage in step.stages if stage.name == "lookup").amount_W
                busiest = float(work.max() / max(work.mean(), 1e-30))
                yield _Run(step, how, busiest, scaled=())  # whole tables are where they are
            if ranks > self._cluster.ranks_per_node:
                step = _table_row_wise(tables, batch, ranks, self._cluster.ranks_per_node)
                work = next(stage for stage in step.stages if stage.name == "lookup").amount_W
                busiest = float(work.max() / max(work.mean(), 1e-30))
                yield _Run(step, "table_row_wise", busiest, scaled=())
        elif system == "hot rows, no dedup":
            yield from self._hot_without_dedup()
        elif system == "dedup by table":
            step = fused_step(tables, batch, ranks, exact_counts=True)
            yield _Run(_table_by_table(step, len(tables)), FUSED, self._busiest(ranks))
        elif system == "fused":
            yield self._fused()
        elif system == "fused + hot rows":
            yield self._fused()
            yield from self._hot()
        else:
            assert system == "fused + 2D", system
            yield self._fused()
            search = replace(self._planning.config.search.groups, sizes="all")
            for groups, layout in groups_of(self._cluster, search):
                if groups.number > 1:
                    step = fused_step(tables, batch, groups.size)
                    step = with_sync(step, tables, batch, groups)
                    how = f"{groups.number} groups of {groups.size}, {layout}"
                    yield _Run(step, how, self._busiest(groups.size), groups.number)

    def _fused(self, hot: HotUse | None = None, how: str = "one group") -> _Run:
        tables, batch, ranks = self._tables, self._batch, self._cluster.ranks
        steps = [fused_step(tables, batch, ranks, exact_counts=e, hot=hot) for e in (False, True)]
        step = min(steps, key=lambda step: step.seconds(self._cluster))
        busiest = self._busiest(ranks, hot_T=None if hot is None else hot.rows_T)
        return _Run(step, how, busiest, hot=hot)

    def _hot(self) -> Iterator[_Run]:
        """Yields the run with hot rows whose step is shortest if rows are spread evenly."""
        sync_every = self._planning.config.search.hot.sync_every
        tables, batch, ranks = self._tables, self._batch, self._cluster.ranks
        uses = [HotUse(rows_T, sync_every) for rows_T in self._hot_rows()]
        if not uses:
            return
        steps = [fused_step(tables, batch, ranks, hot=hot) for hot in uses]
        hot = uses[cheapest(price(step, self._cluster) for step in steps)]
        size = replica_bytes(tables, hot) / MB
        yield self._fused(hot, f"{hot.rows:,} hot rows, {size:.0f} MB")

    def _hot_rows(self) -> list[NDArray[np.int64]]:
        """Returns numbers of hot rows to try, of each table."""
        budget = self._planning.config.search.hot.memory * MB
        tables, batch = self._tables, self._batch
        of_thresholds = most_used_by_class(tables, batch, thresholds(tables, batch), budget)
        return [rows_T for rows_T in of_thresholds if rows_T.any()]

    def _hot_without_dedup(self) -> Iterator[_Run]:
        """Yields the run as in P2RES: rows are replicated or have one owner; no id is left out."""
        tables, batch, ranks = self._tables, self._batch, self._cluster.ranks
        tried = [np.zeros(len(tables), np.int64), *self._hot_rows()]
        steps = [_rows_of_all_ids(tables, batch, ranks, rows_T) for rows_T in tried]
        best = cheapest(step.seconds(self._cluster) for step in steps)
        step, rows_T = steps[best], tried[best]
        busiest = self._busiest(ranks, dedup=False, hot_T=rows_T)
        yield _Run(step, f"{int(rows_T.sum()):,} hot rows", busiest, hot=HotUse(rows_T))

    def _busiest(
        self, ranks: int, dedup: bool = True, hot_T: NDArray[np.int64] | None = None
    ) -> float:
        key = (ranks, dedup, None if hot_T is None else hot_T.tobytes())
        if key not in self._known:
            self._known[key] = busiest_owner(
                self._tables, self._batch, ranks, dedup, hot_T, self._batches, self._seed
            )
        return self._known[key]


def _table_row_wise(tables: Sequence[TableLoad], batch: int, ranks: int, local: int) -> Step:
    """Returns a step with tables on nodes, their rows on the ranks of the node.

    Sums are made within the node, and bags travel between nodes.
    """
    nodes = ranks // local
    by_node = stock_step("table_wise", tables, batch * local, nodes)
    step = Step("table_row_wise", len(tables), ranks)
    for stage in by_node.stages:  # what a node has to do, its ranks share
        if stage.name in ("permute", "outputs", "splits", "lengths"):
            amount = (
                stage.amount_W.max() / local if stage.name != "splits" else stage.amount_W.max()
            )
            step.add(stage.name, stage.kind, float(amount))
        else:
            step.add(stage.name, stage.kind, np.repeat(stage.amount_W, local) / local)
    pooled_W = np.repeat(
        next(stage for stage in by_node.stages if stage.name == "rows").amount_W, local
    )
    within = (local - 1) / local * pooled_W * nodes / max(nodes - 1, 1)
    for name, kind in (("sums", "reduce_scatter"), ("sums_backward", "all_gather")):
        step.stages.append(Stage(name, kind, within, local))
    return step


def _rows_of_all_ids(
    tables: Sequence[TableLoad], batch: int, ranks: int, hot_T: NDArray[np.int64]
) -> Step:
    """Returns a step in which a row travels for every id that is not hot, and back.

    Hot rows are summed by an all-reduce.
    """
    away = (ranks - 1) / ranks
    ids_T = np.array([table.ids(batch) for table in tables])
    covered = [t.classes.coverage(float(h)) for t, h in zip(tables, hot_T, strict=True)]
    cold_T = ids_T * (1 - np.array(covered))
    dims_T = np.array([table.dim for table in tables])
    rows = float(cold_T @ dims_T) * NUMBER_BYTES
    outputs = sum(batch * t.outputs * t.dim * NUMBER_BYTES for t in tables)
    step = Step(ALL_IDS, len(tables), ranks)
    step.add("permute", "ids", ids_T.sum())
    step.add("ids", "all_to_all", away * float(cold_T.sum()) * STOCK_ID_BYTES)
    step.add("lookup", "lookup", rows)
    step.add("rows", "all_to_all", away * rows)
    step.add("pooling", "pooling", float(ids_T @ dims_T) * NUMBER_BYTES + outputs)
    step.add("gradients", "all_to_all", away * rows)
    step.add("update", "lookup", rows)
    if hot_T.any():
        size = float(hot_T @ dims_T) * NUMBER_BYTES
        sent = np.full(ranks, 2 * away * size)
        step.stages.append(Stage(HOT_SYNC, "all_reduce", sent, ranks, can_hide=True))
    return step


def _narrow(tables: Sequence[TableLoad]) -> list[TableLoad]:
    """Returns tables in pieces of few columns, each of which gets all of the table's ids."""
    shards: list[TableLoad] = []
    for table in tables:
        pieces = max(table.dim // NARROW, 1)
        shard = replace(table, dim=table.dim // pieces, state_bytes=table.state_bytes // pieces)
        shards += [shard] * pieces
    return shards


def _table_by_table(step: Step, tables: int) -> Step:
    """Returns a step with the same bytes in collectives of single tables."""
    stages = []
    for stage in step.stages:
        if stage.is_collective:
            stage = replace(stage, amount_W=stage.amount_W / tables, times=float(tables))
        stages.append(stage)
    return Step(step.system, step.tables, step.ranks, stages)
