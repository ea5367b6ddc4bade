"""Bytes of a rank: tables with optimizer state, replicas of hot rows, buffers of a batch."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fusedrec_torchrec.planner.cost.stages import HotUse
from fusedrec_torchrec.planner.cost.table_load import NUMBER_BYTES, TableLoad, even_ranges
from fusedrec_torchrec.sharding.sharding_type import FUSED, OWNER_POOLED

__all__ = [
    "BATCH_BYTES_PER_ID",
    "HOT_INDEX_BYTES",
    "buffer_bytes",
    "column_bytes",
    "owner_bytes",
    "replica_bytes",
    "table_bytes_W",
]

# Per id of a batch on the requester: the id (8), its key (4), sorted key and order (4 + 8), rank
# and inverse (4 + 4), row number before and after ordering by bag (4 + 4).
BATCH_BYTES_PER_ID = 40
STOCK_BYTES_PER_ID = 24  # the id before, on the way and at its rank
OWNED_BYTES_PER_ID = 12  # an id or a length on its way (4), and as FBGEMM wants it (8)
HOT_INDEX_BYTES = 16  # of a hot row: a key and a place, in a hash table half full
Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Placement:
    """Says where one table is.

    Attributes:
        system: its sharding.
        owners: ranks that have all rows of it, or some columns of all rows.
        ranges: where each rank's rows begin, if fused and not split evenly.
    """

    system: str
    owners: Sequence[int] = ()
    ranges: NDArray[np.int64] | None = None


def table_bytes_W(table: TableLoad, placement: Placement, ranks: int) -> Floats:
    """Returns the bytes of weights and optimizer state of a table on each rank."""
    if placement.system == "data_parallel":
        return np.full(ranks, float(table.size))
    if placement.system == "table_wise" or placement.system in OWNER_POOLED:
        bytes_W = np.zeros(ranks)
        bytes_W[list(placement.owners)] = column_bytes(table, len(placement.owners))
        return bytes_W
    if placement.system == "column_wise":
        return np.full(ranks, column_bytes(table, ranks))
    ranges = placement.ranges
    rows_W = np.diff(even_ranges(table.rows, ranks) if ranges is None else ranges)
    return np.asarray(rows_W * float(table.row_bytes))


def column_bytes(table: TableLoad, shards: int) -> float:
    """Returns the bytes of one of some equal column shards, each with its own state of rows."""
    whole = table.state_bytes < table.dim * NUMBER_BYTES
    state = table.state_bytes / (1 if whole else shards)
    return table.rows * (table.dim * table.element_bytes / shards + state)


def buffer_bytes(table: TableLoad, system: str, batch: int, ranks: int) -> float:
    """Returns the bytes that a step needs beside the table on each rank, with gradients."""
    ids, row = table.ids(batch), table.dim * NUMBER_BYTES
    output = batch * table.outputs * row
    if system == FUSED:
        unique = table.unique(batch)
        # Rows that others asked for, rows that were asked for, and the outputs.
        return ids * BATCH_BYTES_PER_ID + 2 * (2 * unique * row + output)
    if system in OWNER_POOLED:  # rows of distinct bags, and the outputs
        bags = table.distinct_bags(batch).bags
        return ids * BATCH_BYTES_PER_ID + 2 * (bags * row + output)
    if system == "table_wise":
        return 2 * output
    if system == "column_wise":  # every rank has all ids, and some columns of all bags
        return ranks * ids * STOCK_BYTES_PER_ID + 4 * output
    if system == "data_parallel":  # and a gradient of the whole table
        return ids * STOCK_BYTES_PER_ID + 2 * output + table.rows * row
    partial = output * (ranks if table.pooled else 1)
    return ids * STOCK_BYTES_PER_ID + 2 * (partial + output)


def owner_bytes(
    table: TableLoad, batch: int, ranks: int, system: str = "table_wise", owners: int = 1
) -> float:
    """Returns the bytes that an owner of all rows needs for ids and bags of all ranks.

    Args:
        table: that it has all columns of, or an equal part of them.
        batch: samples of a rank.
        ranks: that ask.
        system: the table's sharding.
        owners: that share its columns.
    """
    row = table.dim * NUMBER_BYTES / owners
    if system in OWNER_POOLED:
        bags = table.distinct_bags(batch)
        return ranks * ((bags.ids + bags.bags) * OWNED_BYTES_PER_ID + 2 * bags.bags * row)
    return ranks * (table.ids(batch) * STOCK_BYTES_PER_ID + 2 * batch * table.outputs * row)


def replica_bytes(tables: Sequence[TableLoad], hot: HotUse | None) -> float:
    """Returns the bytes of the replicas of all hot rows, on every rank."""
    if hot is None:
        return 0.0
    row_T = np.array([float(t.row_bytes + HOT_INDEX_BYTES) for t in tables])
    return float(hot.rows_T @ row_T)
