"""A training step of TorchRec's own shardings; the formulas stand in ``step``."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from fusedrec_torchrec.planner.cost.stages import Step
from fusedrec_torchrec.planner.cost.table_load import NUMBER_BYTES, TableLoad, even_ranges
from fusedrec_torchrec.sharding.sharding_type import FUSED_TYPES, SHARDINGS

__all__ = ["STOCK", "STOCK_ID_BYTES", "spread", "stock_step"]

STOCK = tuple(kind for kind in SHARDINGS if kind not in FUSED_TYPES)
STOCK_ID_BYTES, LENGTH_BYTES = 8, 4
STOCK_SPLIT_BYTES = 24  # of TorchRec's first all-to-all, to each other rank
Floats = NDArray[np.float64]


def stock_step(
    system: str,
    tables: Sequence[TableLoad],
    batch: int,
    ranks: int,
    owner_T: Sequence[int] | None = None,
    on_host: Sequence[bool] | None = None,
) -> Step:
    """Returns a step of a stock sharding, the same for all tables.

    Args:
        system: one of ``STOCK``.
        tables: all of them pooled, or none.
        batch: samples of a rank.
        ranks: over which the tables are sharded.
        owner_T: rank of each table, if table-wise; the next less loaded one if None.
        on_host: which tables are in host memory.
    """
    assert system in STOCK, system
    host_T = np.zeros(len(tables), bool) if on_host is None else np.array(on_host, bool)
    stock = _StockTables(tables, batch, ranks, host_T)
    step = Step(system, len(tables), ranks)
    # Outputs and their gradients; row-wise, partial sums of the bags of all ranks.
    is_partial = system == "row_wise" and stock.is_pooled
    step.add("permute", "ids", stock.ids_T.sum())
    step.add("outputs", "pooling", 2 * stock.pooled * (ranks if is_partial else 1))
    if system == "data_parallel":
        stock.add_data_parallel(step)
        return step
    step.add("splits", "all_to_all", (ranks - 1) * STOCK_SPLIT_BYTES)
    if system == "table_wise":
        stock.add_table_wise(step, owner_T)
        return step
    step.add("lengths", "all_to_all", (ranks - 1) * stock.bags_T.sum() * LENGTH_BYTES)
    if system == "row_wise":
        stock.add_row_wise(step)
    else:
        stock.add_column_wise(step)
    return step


class _StockTables:
    """Adds the stages of stock shardings to a step, for tables that are sharded alike."""

    def __init__(
        self,
        tables: Sequence[TableLoad],
        batch: int,
        ranks: int,
        host_T: NDArray[np.bool_],
    ) -> None:
        self._tables, self._ranks, self._host_T = tables, ranks, host_T
        self.ids_T = np.array([table.ids(batch) for table in tables])
        self.bags_T = np.array([float(batch * table.bags) for table in tables])
        out_T = np.array([batch * table.outputs for table in tables])
        row_bytes_T = np.array([float(table.dim * NUMBER_BYTES) for table in tables])
        table_bytes_T = np.array([float(table.dim * table.element_bytes) for table in tables])
        self._read_T = self.ids_T * table_bytes_T
        self._work_T, self._pooled_T = self.ids_T * row_bytes_T, out_T * row_bytes_T
        self.pooled = float(self._pooled_T.sum())
        self.is_pooled = all(table.pooled for table in tables)

    def add_data_parallel(self, step: Step) -> None:
        size = sum(table.rows * table.dim * NUMBER_BYTES for table in self._tables)
        step.add("lookup", "lookup", self._read_T.sum())
        step.add("gradients", "all_reduce", 2 * (self._ranks - 1) / self._ranks * size)
        step.add("update", "lookup", 2 * size)

    def add_table_wise(self, step: Step, owner_T: Sequence[int] | None) -> None:
        ranks, ids_T, bags_T = self._ranks, self.ids_T, self.bags_T
        if owner_T is None:
            owner_T = spread(self._work_T + self._pooled_T, ranks)
        mine_TW = (np.array(owner_T)[:, None] == np.arange(ranks)).astype(np.float64)
        step.add("lengths", "all_to_all", (bags_T.sum() - bags_T @ mine_TW) * LENGTH_BYTES)
        step.add("ids", "all_to_all", (ids_T.sum() - ids_T @ mine_TW) * STOCK_ID_BYTES)
        step.look_up("lookup", ranks * self._read_T, mine_TW, self._host_T)
        pooled_W = self._pooled_T @ mine_TW
        step.add("rows", "all_to_all", (ranks - 1) * pooled_W)
        step.add("gradients", "all_to_all", pooled_W.sum() - pooled_W)
        step.look_up("update", ranks * self._read_T, mine_TW, self._host_T)

    def add_row_wise(self, step: Step) -> None:
        ranks, others = self._ranks, self._ranks - 1
        shares_TW = np.stack([t.access_share(even_ranges(t.rows, ranks)) for t in self._tables])
        ids_W, work_W = self.ids_T @ shares_TW, ranks * (self._work_T @ shares_TW)
        step.add("ids", "all_to_all", (ids_W.sum() - ids_W) * STOCK_ID_BYTES)
        step.look_up("lookup", ranks * self._read_T, shares_TW, self._host_T)
        if self.is_pooled:
            step.add("rows", "reduce_scatter", others * self.pooled)
            step.add("gradients", "all_gather", others * self.pooled)
        else:
            sent_W = work_W / ranks
            step.add("rows", "all_to_all", others * sent_W)
            step.add("gradients", "all_to_all", sent_W.sum() - sent_W)
        step.look_up("update", ranks * self._read_T, shares_TW, self._host_T)

    def add_column_wise(self, step: Step) -> None:
        ranks, others = self._ranks, self._ranks - 1
        step.add("ids", "all_to_all", others * self.ids_T.sum() * STOCK_ID_BYTES)
        everywhere_TW = np.ones((len(self._tables), ranks))
        step.look_up("lookup", self._read_T, everywhere_TW, self._host_T)
        step.add("rows", "all_to_all", others / ranks * self.pooled)
        step.add("gradients", "all_to_all", others / ranks * self.pooled)
        step.look_up("update", self._read_T, everywhere_TW, self._host_T)


def spread(work_T: Floats, ranks: int) -> list[int]:
    """Returns the rank of each table: the largest table first, always to the least loaded rank."""
    load, owner = np.zeros(ranks), [0] * len(work_T)
    for t in np.argsort(-work_T, kind="stable"):
        rank = int(load.argmin())
        owner[int(t)] = rank
        load[rank] += work_T[t]
    return owner
