"""What a training step costs, formula by formula: bytes of each collective, work of each stage.

A step is a list of stages, each with a number for every rank: bytes that the rank sends in a
collective, or bytes and ids that it works on.  Bytes are countable, and benchmarks count them.
Seconds come from a cluster's rates.  A collective takes as long as it takes the rank that sends
most; stages between two collectives take as long as the rank that is busiest in all of them
together.

Letters: W ranks; T tables; B samples of a rank's batch; n ids of a table in it, B times its
pooling; U distinct rows among them, the sum over rows of 1 - (1 - p)^n; G distinct bags, with m
ids in them; D columns; 4 bytes a number; s the share of a table's U rows that a rank owns.

==================  ==============================================================================
fused_row_wise
------------------  ------------------------------------------------------------------------------
dedup               n ids are made keys, unique, and bags of rows
ids                 W - 1 messages of header and capacity: the most rows asked of one owner, with
                    slack; 4 bytes each.  With exact counts: the headers, then U (1 - s) ids
lookup              an owner reads the rows that W ranks ask for, W U s
rows                an owner sends what W - 1 others asked for, (W - 1) U s rows as the codec
                    writes them
pooling             n rows are read and pooled; or the m of distinct bags, and bags are copied
pooling_backward    gradients of the outputs are summed for each of the U rows
gradients           the rows' way back, U (1 - s)
update              an owner applies what W ranks sent
------------------  ------------------------------------------------------------------------------
fused_table_wise    in the same three collectives, of the same step
dedup               bags are made unique, as ids are in other tables
bag_dedup           n ids are read to tell their bags apart, and sent
ids                 G lengths and m ids go to the owner, and m weights if there are any
lookup              the owner answers with W G rows, each as if it were a row that is asked for
bag_lookup          and adds up the other W (m - G) rows of their bags
owner_ids           going through W m ids, however few its columns; again in update_ids
rows                it sends (W - 1) G rows as the codec writes them
pooling             rows of distinct bags are copied to all bags that are like them
pooling_backward    gradients of equal bags are summed
gradients           the rows' way back, G from everyone who is not the owner
update              the same again, with bag_update and update_ids

fused_column_wise   the same with C owners: ids go to each of them, and each has D / C columns
------------------  ------------------------------------------------------------------------------
with hot rows       U is of the other rows, and
hot_lookup          n ids are looked for among the hot rows
hot_sync            H distinct hot rows of a batch go to W - 1 ranks, with their places; or all hot
                    rows are summed by an all-reduce, 2 (W - 1) / W, if that is fewer bytes.  Every
                    k steps, H is of k batches.  Only fused_row_wise has hot rows

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

A bucket, fused tables that are alike and pooled in the same place, has a price of its own.

In stock shardings of sequences a row travels for every id, where there are bags here.
"""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from fusedrec_torchrec.access.bag_counts import DistinctBags
from fusedrec_torchrec.access.replication import sync_of
from fusedrec_torchrec.codecs.options import Codecs
from fusedrec_torchrec.codecs.wire import bytes_of_row
from fusedrec_torchrec.exchange.capacity import GRANULE
from fusedrec_torchrec.exchange.messages import COUNTS
from fusedrec_torchrec.planner.cost.stages import HOT_SYNC, NO_ROWS, Groups, HotUse, Stage, Step
from fusedrec_torchrec.planner.cost.stock import STOCK, STOCK_ID_BYTES, stock_step
from fusedrec_torchrec.planner.cost.table_load import NUMBER_BYTES, TableLoad, even_ranges
from fusedrec_torchrec.sharding.sharding_type import FUSED

__all__ = [
    "NO_ROWS",
    "SLACK",
    "STOCK",
    "STOCK_ID_BYTES",
    "Groups",
    "HotUse",
    "Owners",
    "Stage",
    "Step",
    "fused_step",
    "stock_step",
    "with_sync",
]

SLACK = 0.125
NO_BAGS = DistinctBags(0.0, 0.0)
Floats = NDArray[np.float64]
Owners = Sequence[Sequence[int]]  # ranks that have columns of each table; none if rows are split


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
    owners: Owners | None = None,
) -> Step:
    """Returns a step of fused tables, whatever their types.

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
        owners: of each table, the ranks that have its columns and pool them: one is
            ``fused_table_wise``, several ``fused_column_wise``; none where rows are split, as they
            are in all tables if this is None.
    """
    owned = _OwnedTables(tables, batch, ranks, owners, codecs or Codecs())
    hot_T = np.zeros(len(tables), np.int64) if hot is None else hot.rows_T
    shares_TW = _shares(tables, batch, ranks, ranges, hot, owned.mask_TW)
    ids_T = np.array([table.ids(batch) for table in tables])
    unique_T = np.array([t.unique(batch, int(h)) for t, h in zip(tables, hot_T, strict=True)])
    unique_T = unique_T * ~owned.is_owned_T
    table_bytes_T = np.array([float(table.dim * table.element_bytes) for table in tables])
    outputs = sum(batch * t.outputs * t.dim * NUMBER_BYTES for t in tables)
    # What one requester asks of each owner: ids of rows, and bags with their lengths.
    asked_W = unique_T @ shares_TW + owned.words_W
    bytes_T2 = np.array([bytes_of_row(codecs or Codecs(), table.dim) for table in tables])
    rows_W, gradients_W = (
        (unique_T * bytes_T) @ shares_TW + bags_W
        for bytes_T, bags_W in zip(bytes_T2.T, owned.rows_2W, strict=True)
    )
    host_T = np.zeros(len(tables), bool) if on_host is None else np.array(on_host, bool)

    step = Step(FUSED, len(tables), ranks, buckets=owned.buckets)
    step.add("dedup", "ids", (ids_T * ~owned.is_owned_T).sum() + owned.full_bags)
    if owned.is_owned_T.any():
        step.add("bag_dedup", "bag_ids", (ids_T * owned.is_owned_T).sum())
    if hot is not None and hot.rows:
        step.add("hot_lookup", "hot", (ids_T * ~owned.is_owned_T).sum())
    header = COUNTS + owned.buckets + owned.bag_buckets
    if exact_counts:
        step.add("counts", "all_to_all", (ranks - 1) * header * NUMBER_BYTES)
        step.add("ids", "all_to_all", (asked_W.sum() - asked_W) * NUMBER_BYTES)
    else:
        wanted = np.ceil(asked_W.max() * (1 + slack) / GRANULE) * GRANULE
        step.add("ids", "all_to_all", (ranks - 1) * (header + wanted) * NUMBER_BYTES)
    looked_up = (ranks * unique_T * table_bytes_T, shares_TW, host_T, ranks * owned.answered_W)
    step.look_up("lookup", *looked_up)
    if owned.is_owned_T.any():
        step.add("bag_lookup", "bag_lookup", ranks * owned.read_W)
        step.add("owner_ids", "owner_ids", ranks * owned.ids_W)
    step.add("rows", "all_to_all", (ranks - 1) * rows_W)
    step.add("pooling", "pooling", owned.pooled_by_requester)
    step.add("pooling_backward", "pooling", outputs)
    step.add("gradients", "all_to_all", gradients_W.sum() - gradients_W)
    step.look_up("update", *looked_up)
    if owned.is_owned_T.any():
        step.add("bag_update", "bag_lookup", ranks * owned.read_W)
        step.add("update_ids", "owner_ids", ranks * owned.ids_W)
    if hot is not None and hot.rows:
        return _with_hot_sync(step, tables, batch, hot)
    return step


class _OwnedTables:
    """Holds what fused tables add to a step whose owners pool them, and what bags cost all.

    Attributes:
        mask_TW: 1 where a rank has columns of such a table.
        is_owned_T: which tables are such.
        words_W: numbers that one requester sends to each owner, lengths, ids and weights.
        rows_2W: bytes of rows, and of gradients, of one requester's bags at each owner.
        answered_W: bytes of rows that each owner answers one requester with.
        read_W: bytes that it reads for that, beyond the first row of each bag.
        ids_W: how many ids it goes through.
        full_bags: bags of a requester that are not empty, of such tables.
        pooled_by_requester: bytes that a requester pools or copies, of all tables.
        buckets: how many of them all tables make.
        bag_buckets: how many of these owners pool, whose ids are counted, too.
    """

    def __init__(
        self,
        tables: Sequence[TableLoad],
        batch: int,
        ranks: int,
        owners: Owners | None,
        codecs: Codecs,
    ) -> None:
        self.mask_TW = np.zeros((len(tables), ranks))
        self.words_W, self.answered_W, self.read_W, self.ids_W = np.zeros((4, ranks))
        self.rows_2W = np.zeros((2, ranks))
        self.full_bags = self.pooled_by_requester = 0.0
        buckets = set()
        for t, table in enumerate(tables):
            own = () if owners is None else owners[t]
            bags = table.distinct_bags(batch) if table.pooled else NO_BAGS
            if own:
                columns = table.dim // len(own)
                at = list(own)
                self.mask_TW[t, at] = 1.0
                self.words_W[at] += bags.bags + bags.ids * (2 if table.weighted else 1)
                others = max(bags.ids - bags.bags, 0.0)
                self.answered_W[at] += bags.bags * columns * table.element_bytes
                self.read_W[at] += others * columns * table.element_bytes
                self.ids_W[at] += bags.ids
                self.rows_2W[:, at] += np.outer(
                    bytes_of_row(codecs, columns), [bags.bags] * len(at)
                )
                self.full_bags += table.full_bags(batch)
                read = batch * table.outputs
            else:
                columns, read = table.dim, table.ids(batch)
                if table.pooled:
                    read = min(read, bags.ids + batch * table.bags)
            self.pooled_by_requester += read * table.dim * NUMBER_BYTES
            buckets.add((columns, table.kind, bool(own)))
        self.is_owned_T = self.mask_TW.any(1)
        self.buckets = len(buckets)
        self.bag_buckets = sum(is_owned for *_, is_owned in buckets)


def _shares(
    tables: Sequence[TableLoad],
    batch: int,
    ranks: int,
    ranges: Sequence[NDArray[np.int64]] | None,
    hot: HotUse | None,
    mask_TW: Floats | None = None,
) -> Floats:
    """Returns the share of each rank in the distinct rows of each table that are not hot.

    Ranks that have columns of a table have equal shares in it.
    """
    shares = []
    for t, table in enumerate(tables):
        ids = NO_ROWS if hot is None else hot.of(t)
        if mask_TW is not None and mask_TW[t].any():
            shares.append(mask_TW[t] / mask_TW[t].sum())
        elif ranges is None and not len(ids):
            shares.append(table.even_share(ranks, batch))
        else:
            own = even_ranges(table.rows, ranks) if ranges is None else ranges[t]
            shares.append(table.share(own, batch, ids))
    return np.stack(shares)


def _with_hot_sync(step: Step, tables: Sequence[TableLoad], batch: int, hot: HotUse) -> Step:
    bytes_T = np.array([float((table.dim + 1) * NUMBER_BYTES) for table in tables])

    def touched(batches: int) -> float:
        hot_T = [
            table.unique(batch * batches) - table.unique(batch * batches, int(rows))
            for table, rows in zip(tables, hot.rows_T, strict=True)
        ]
        return float(hot_T @ bytes_T)

    sync = sync_of(touched, float(hot.rows_T @ bytes_T), step.ranks, hot.sync_every)
    kind = "all_to_all" if sync.is_sparse else "all_reduce"
    sent_W = np.full(step.ranks, float(sync.sent))
    stage = Stage(HOT_SYNC, kind, sent_W, step.ranks, times=1 / sync.every, can_hide=True)
    return replace(step, stages=[*step.stages, stage])


def with_sync(
    step: Step,
    tables: Sequence[TableLoad],
    batch: int,
    groups: Groups,
    ranges: Sequence[NDArray[np.int64]] | None = None,
    owners: Owners | None = None,
) -> Step:
    """Returns a step of one of several groups, with the sync of their replicas.

    Args:
        step: of a group.
        tables: that it is of.
        batch: samples of a rank.
        groups: of ranks.
        ranges, owners: as of ``fused_step``.
    """
    step = step.in_groups(groups)
    size, number = groups.size, groups.number
    if number < 2:
        return step
    mask_TW = _OwnedTables(tables, batch, size, owners, Codecs()).mask_TW
    shares_TW = _shares(tables, batch, size, ranges, None, mask_TW)
    steps = groups.sync_every
    group_T = np.array([t.unique(batch * size * steps) for t in tables])
    own_W = group_T @ np.where(mask_TW > 0, mask_TW, shares_TW)  # all owners of columns touch a row

    def stage(name: str, kind: str, amount_W: Floats, times: float = 1.0) -> Stage:
        return Stage(name, kind, amount_W, number, groups.local_replicas, times)

    if groups.sync == "gradients":
        columns_W = (group_T * np.array([float(t.dim) for t in tables])) @ shares_TW
        sent_W = (number - 1) * (columns_W + own_W) * NUMBER_BYTES
        step.stages.append(stage("sync_gradients", "all_to_all", sent_W))
        return step
    somewhere_T = np.array([t.unique(batch * size * number * steps) for t in tables])
    bytes_T = np.array([float(t.row_bytes) for t in tables])
    touched_W = (somewhere_T * bytes_T) @ shares_TW
    whole_W = np.zeros(size)
    for t, table in enumerate(tables):
        own = even_ranges(table.rows, size) if ranges is None else ranges[t]
        mine = mask_TW[t] / max(mask_TW[t].sum(), 1.0) * table.rows
        whole_W += (mine if mask_TW[t].any() else np.diff(own)) * table.row_bytes
    reduced = 2 * (number - 1) / number
    numbers_W = (number - 1) * own_W * NUMBER_BYTES * (1 + SLACK)
    if (reduced * touched_W + numbers_W).max() < reduced * whole_W.max():
        step.stages.append(stage("sync_ids", "all_to_all", numbers_W, 1 / steps))
        step.stages.append(stage("sync_rows", "all_reduce", reduced * touched_W, 1 / steps))
    else:
        step.stages.append(stage("sync_rows", "all_reduce", reduced * whole_W, 1 / steps))
    return step
