"""What tables and shardings cost on a cluster, one by one.

Prices of tables add up, so that a search need not look at a whole step for every move.  The one
exception are tables whose rows are all on one rank, or whose columns are on a few: there the
busiest rank counts.  For these a price has a part that adds up, and loads of ranks.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fusedrec_torchrec.planner.cost.cluster import GB, ClusterConfig
from fusedrec_torchrec.planner.cost.stages import Groups, Step
from fusedrec_torchrec.planner.cost.step import SLACK, fused_step, stock_step, with_sync
from fusedrec_torchrec.planner.cost.table_load import NUMBER_BYTES, TableLoad
from fusedrec_torchrec.sharding.sharding_type import (
    FUSED,
    FUSED_COLUMN_WISE,
    FUSED_TABLE_WISE,
    FUSED_TYPES,
    OWNER_POOLED,
    SHARDINGS,
)

__all__ = ["LOADS", "OWNED", "Prices", "exchange_of", "owned_as"]

TABLE_WISE = "table_wise"
OWNED = {TABLE_WISE: (TABLE_WISE,), FUSED_TABLE_WISE: OWNER_POOLED}  # kinds of loads, of whom
KIND_OF = {system: kind for kind, systems in OWNED.items() for system in systems}
ALONE = {
    *("lengths", "ids", "lookup", "bag_lookup", "owner_ids"),
    *("rows", "gradients", "update", "bag_update", "update_ids"),
}
FEWEST_OWNERS = 2  # of columns
LOADS = 6  # lengths, ids, ids of owners, answered, looked up, sent
Floats = NDArray[np.float64]


def owned_as(system: str) -> str | None:
    """Returns the kind of loads that tables of a sharding are; None if all ranks have parts."""
    return KIND_OF.get(system)


def exchange_of(system: str) -> str:
    """Returns the sharding that stands for all that travel with this one."""
    return FUSED if system in FUSED_TYPES else system


# Shardings whose tables travel together, and those of them that are pooled in the same place.
SAME_EXCHANGE: dict[str, tuple[str, ...]] = {
    s: tuple(o for o in SHARDINGS if exchange_of(o) == exchange_of(s)) for s in SHARDINGS
}
SAME_POOLING: dict[str, tuple[str, ...]] = {
    s: tuple(o for o in SAME_EXCHANGE[s] if owned_as(o) == owned_as(s)) for s in SHARDINGS
}


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

    Attributes:
        ranks: of a group.
        of_use: seconds of a sharding's exchange without tables.
        of_tables: seconds that each table adds; without the loads of its ranks, if they are few.
        loads: of each kind of ``OWNED``, for each table: bytes of lengths and of ids; ids that
            fused owners go through; bytes of rows that these answer with, of rows that are looked
            up (of fused tables, others than the first of each bag), and of rows that travel, all of
            one requester.
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
                use = (table.pooling, table.classes, table.bags, table.pooled, table.bag_use)
                key = (*size, *use, table.weighted, host)
                if key not in known:
                    known[key] = self._step(system, table, host).seconds(cluster) - base
                prices.append(known[key])
            self.of_tables[system] = np.array(prices)
        step = stock_step(TABLE_WISE, [nothing], batch, self.ranks).in_groups(groups)
        rows = next(stage for stage in step.stages if stage.name == "rows")
        self._wire = rows.line(cluster).per_byte
        twice = 2 * self.ranks / GB  # lookup and update, for all ranks
        self._answer = twice / cluster.fused.lookup
        self._owner_id = 2 * self.ranks / (1e6 * cluster.fused.rate("owner_ids"))
        self._lookup = {
            TABLE_WISE: twice / cluster.rates(TABLE_WISE).lookup,
            FUSED_TABLE_WISE: twice / cluster.fused.rate("bag_lookup"),
        }
        self.loads = {
            TABLE_WISE: np.array([_stock_load(table, batch) for table in tables]).T,
            FUSED_TABLE_WISE: np.array([_fused_load(table, batch) for table in tables]).T,
        }

    def _step(self, system: str, table: TableLoad, host: bool) -> Step:
        """Returns a step of one table alone, its rows balanced.

        If a few ranks have all rows, it is without what the busiest of them adds.
        """
        spread = replace(table, places=None)
        even: Any = [np.linspace(0, table.rows, self.ranks + 1)]
        owned = owned_as(system) is not None
        host &= not owned  # whole tables stay on devices
        if system in FUSED_TYPES:
            owners = [(0,)] if owned else None
            step = fused_step(
                [spread],
                self._batch,
                self.ranks,
                even,
                exact_counts=True,
                on_host=[host],
                owners=owners,
            )
            if not self._exact_counts:  # whose messages have one capacity for all tables
                stages = [
                    replace(p, amount_W=p.amount_W * (1 + SLACK)) if p.name == "ids" else p
                    for p in step.stages
                    if p.name != "counts"
                ]
                step = replace(step, stages=stages)
        else:
            step = stock_step(system, [spread], self._batch, self.ranks, on_host=[host])
        if owned:
            stages = [
                replace(p, amount_W=np.zeros(self.ranks)) if p.name in ALONE else p
                for p in step.stages
            ]
            step = replace(step, stages=stages)
        return with_sync(step, [spread], self._batch, self._groups, even)

    def of_first(self, system: str, count: Mapping[str, int]) -> float:
        """Returns what the first table of a sharding costs beside its own price.

        Args:
            system: the sharding.
            count: tables of each sharding, without this one.
        """
        if any(count.get(s) for s in SAME_POOLING[system]):
            return 0.0
        if any(count.get(s) for s in SAME_EXCHANGE[system]):  # a bucket of their own
            return self._cluster.rates(system).bucket * 1e-6
        return self.of_use[system]

    def load_of(self, kind: str, t: int, owners: int) -> Floats:
        """Returns the load of a table on each of its owners: all ids, and a part of the columns."""
        return np.asarray(self.loads[kind][:, t] / [1, 1, 1, *[owners] * 3])

    def of_owned(self, kind: str, loads_KW: Floats) -> float:
        """Returns what the busiest rank adds to a step; loads are as in ``loads``."""
        lengths, ids, owner_ids, answered, work, pooled = loads_KW
        others = self.ranks - 1
        wire = lengths.sum() - lengths.min() + ids.sum() - ids.min()
        if kind != TABLE_WISE and not self._exact_counts:
            wire = others * (1 + SLACK) * ids.max()
        wire += others * pooled.max() + pooled.sum() - pooled.min()
        busy_W = self._answer * answered + self._lookup[kind] * work + self._owner_id * owner_ids
        return float(self._wire * wire + busy_W.max())

    def of_ranks(self, kind: str, loads_KW: Floats) -> Floats:
        """Returns how busy each rank is with its loads, in seconds."""
        lengths, ids, owner_ids, answered, work, pooled = loads_KW
        wire = (self.ranks - 1) * (lengths + ids + pooled)
        looked_up = self._answer * answered + self._lookup[kind] * work
        return np.asarray(self._wire * wire + looked_up + self._owner_id * owner_ids)

    def balanced(self, system: str) -> Floats:
        """Returns the prices of tables if the load of ranks were spread evenly."""
        prices, kind = self.of_tables[system], owned_as(system)
        if kind is None:
            return prices
        lengths, ids, owner_ids, answered, work, pooled = self.loads[kind]
        owners = FEWEST_OWNERS if system == FUSED_COLUMN_WISE else 1
        slack = 1 + SLACK if kind != TABLE_WISE and not self._exact_counts else 1.0
        away = (self.ranks - 1) / self.ranks
        wire = away * (lengths + owners * slack * ids + 2 * pooled)
        looked_up = (
            self._answer * answered + self._lookup[kind] * work
        ) + self._owner_id * owners * owner_ids
        return np.asarray(prices + self._wire * wire + looked_up / self.ranks)


def _stock_load(table: TableLoad, batch: int) -> tuple[float, ...]:
    """Returns the loads of a table that is table-wise."""
    row = table.dim * NUMBER_BYTES
    ids = table.ids(batch)
    return batch * table.bags * 4.0, 8.0 * ids, 0.0, 0.0, ids * row, batch * table.outputs * row


def _fused_load(table: TableLoad, batch: int) -> tuple[float, ...]:
    """Returns the loads of a table whose owners pool it."""
    if not table.pooled:
        return (0.0,) * LOADS
    bags = table.distinct_bags(batch)
    words = bags.bags + bags.ids * (2 if table.weighted else 1)
    row = table.dim * table.element_bytes
    sent = bags.bags * table.dim * NUMBER_BYTES
    others = max(bags.ids - bags.bags, 0.0)
    return 0.0, words * NUMBER_BYTES, bags.ids, bags.bags * row, others * row, sent
