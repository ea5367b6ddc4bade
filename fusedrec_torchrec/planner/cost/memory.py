"""Bytes of a rank: tables with optimizer state, replicas of hot rows, buffers of a batch."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fusedrec_torchrec.planner.cost.step import HotUse
from fusedrec_torchrec.planner.cost.table_load import NUMBER_BYTES, TableLoad, even_ranges
from fusedrec_torchrec.sharding.sharding_type import FUSED

__all__ = [
    "BATCH_BYTES_PER_ID",
    "HOT_INDEX_BYTES",
    "buffer_bytes",
    "owner_bytes",
    "replica_bytes",
    "table_bytes_W",
]

# Per id of a batch on the requester: the id (8), its key (4), sorted key and order (4 + 8), rank
# and inverse (4 + 4), row number before and after ordering by bag (4 + 4).
BATCH_BYTES_PER_ID = 40
STOCK_BYTES_PER_ID = 24  # the id before, on the way and at its rank
HOT_INDEX_BYTES = 16  # of a hot row: a key and a place, in a hash table half full
Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Placement:
    """Says where one table is.

    Attributes:
        system: its sharding.
        owner: its rank, if table-wise.
        ranges: where each rank's rows begin, if fused and not split evenly.
    """

    system: str
    owner: int = 0
    ranges: NDArray[np.int64] | None = None


def table_bytes_W(table: TableLoad, placement: Placement, ranks: int) -> Floats:
    """Returns the bytes of weights and optimizer state of a table on each rank."""
    if placement.system == "data_parallel":
        return np.full(ranks, float(table.size))
    if placement.system == "table_wise":
        return np.where(np.arange(ranks) == placement.owner, float(table.size), 0.0)
    if placement.system == "column_wise":
        # Each column shard has its own state of rows.
        whole = table.state_bytes < table.dim * NUMBER_BYTES
        state = table.state_bytes * (1 if whole else 1 / ranks)
        return np.full(ranks, table.rows * (table.dim * table.element_bytes / ranks + state))
    ranges = placement.ranges
    rows_W = np.diff(even_ranges(table.rows, ranks) if ranges is None else ranges)
    return np.asarray(rows_W * float(table.row_bytes))


def buffer_bytes(table: TableLoad, system: str, batch: int, ranks: int) -> float:
    """Returns the bytes that a step needs beside the table on each rank, with gradients."""
    ids, row = table.ids(batch), table.dim * NUMBER_BYTES
    output = batch * table.outputs * row
    if system == FUSED:
        unique = table.unique(batch)
        # Rows that others asked for, rows that were asked for, and the outputs.
        return ids * BATCH_BYTES_PER_ID + 2 * (2 * unique * row + output)
    if system == "table_wise":
        return 2 * output
    if system == "column_wise":  # every rank has all ids, and some columns of all bags
        return ranks * ids * STOCK_BYTES_PER_ID + 4 * output
    if system == "data_parallel":  # and a gradient of the whole table
        return ids * STOCK_BYTES_PER_ID + 2 * output + table.rows * row
    partial = output * (ranks if table.pooled else 1)
    return ids * STOCK_BYTES_PER_ID + 2 * (partial + output)


def owner_bytes(table: TableLoad, batch: int, ranks: int) -> float:
    """Returns the bytes that the owner of a whole table needs for ids and bags of all ranks."""
    output = batch * table.outputs * table.dim * NUMBER_BYTES
    return ranks * (table.ids(batch) * STOCK_BYTES_PER_ID + 2 * output)


def replica_bytes(tables: Sequence[TableLoad], hot: HotUse | None) -> float:
    """Returns the bytes of the replicas of all hot rows, on every rank."""
    if hot is None:
        return 0.0
    row_T = np.array([float(t.row_bytes + HOT_INDEX_BYTES) for t in tables])
    return float(hot.rows_T @ row_T)
