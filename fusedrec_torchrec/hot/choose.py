"""Which rows are hot: what rules and the access profile say, checked against the tables."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from fusedrec_torchrec.access.access_profile import AccessProfile
from fusedrec_torchrec.access.hot_set import HotSet
from fusedrec_torchrec.access.replication import chance_in_batch, likeliest_first
from fusedrec_torchrec.exchange.buckets import BucketedTables
from fusedrec_torchrec.exchange.layout import ExchangeLayout
from fusedrec_torchrec.hot.cost import RowUse, rows_to_replicate
from fusedrec_torchrec.hot.index import EMPTY
from fusedrec_torchrec.hot.options import HotOptions, HotRule
from fusedrec_torchrec.hot.rule_checks import check_counts, checked_ids

__all__ = ["Chosen", "choose"]


@dataclass(frozen=True)
class Chosen:
    """The hot rows to begin with.

    Attributes:
        ids: of each table, in the order of the layout.
        capacity: places of each bucket's replica, at least as many as it has hot rows.
    """

    ids: list[NDArray[np.int64]]
    capacity: list[int]

    def home_keys(self, layout: ExchangeLayout) -> list[torch.Tensor]:
        """Returns the key in each place of each bucket's replica."""
        filled = []
        for bucket, capacity in zip(layout.buckets, self.capacity, strict=True):
            keys = torch.cat(
                [
                    layout.keys_of(t, torch.from_numpy(self.ids[t]))
                    for t in range(bucket.first_table, bucket.end_table)
                ]
            )
            empty = keys.new_full((capacity - keys.numel(),), EMPTY)
            filled.append(torch.cat([keys, empty]))
        return filled


def choose(options: HotOptions, tables: BucketedTables) -> Chosen | None:
    """Returns the hot rows of a module's fused tables; None if there are no rules.

    Args:
        options: rules for single tables of the module and for all others together.
        tables: of the module.

    Raises:
        ValueError: what is wrong with which rule.
    """
    rules = options.tables
    if not rules and options.rule is None and options.hot_set is None:
        return None
    if options.hot_set is not None:
        hot_set = HotSet.load(options.hot_set)
        hot_set.check({table.name: table.rows for table in tables.tables})
        given = {name: HotRule(ids=ids.tolist()) for name, ids in hot_set.ids.items()}
        names = {table.name for table in tables.tables}
        rules = {**{n: rule for n, rule in given.items() if n in names}, **rules}
    return _Choice(rules, options, tables).choose()


class _Choice:
    def __init__(
        self,
        rules: Mapping[str, HotRule],
        options: HotOptions,
        tables: BucketedTables,
    ) -> None:
        self._rules = rules
        self._options = options
        self._tables = tables
        self._numbers = {table.name: t for t, table in enumerate(tables.tables)}
        self._bucket_of = [
            k for k, b in enumerate(tables.buckets) for _ in range(b.first_table, b.end_table)
        ]
        self._row_bytes = [bucket.row_bytes for bucket in tables.buckets]
        self._wire_bytes = [bucket.wire_bytes for bucket in tables.buckets]
        self._profile: AccessProfile | None = None
        if options.profile is not None:
            self._profile = AccessProfile.load(options.profile)
            self._profile.check({table.name: table.rows for table in tables.tables})
        self._ids: list[NDArray[np.int64]] = [np.empty(0, np.int64) for _ in tables.tables]
        self._room = [0] * len(tables.buckets)

    def choose(self) -> Chosen:
        for name, rule in self._rules.items():
            self._apply(rule, [self._numbers[name]], f"hot rows of table {name!r}")
        if self._options.rule is not None:
            others = [t for name, t in self._numbers.items() if name not in self._rules]
            self._apply(self._options.rule, others, "hot rows")
        sizes = [
            sum(len(self._ids[t]) for t in range(b.first_table, b.end_table))
            for b in self._tables.buckets
        ]
        most = [
            sum(table.rows for table in self._tables.tables[b.first_table : b.end_table])
            for b in self._tables.buckets
        ]
        capacity = [
            max(size, min(room, rows) if self._options.adapt is not None else 0)
            for size, room, rows in zip(sizes, self._room, most, strict=True)
        ]
        return Chosen(self._ids, capacity)

    def _apply(self, rule: HotRule, tables: list[int], where: str) -> None:
        if not tables:
            return
        if rule.ids is not None:
            (t,) = tables
            self._ids[t] = checked_ids(rule.ids, self._tables.tables[t].rows, where)
            self._room[self._bucket_of[t]] += len(self._ids[t])
            return
        if rule.memory is not None:
            largest = max(self._row_bytes[self._bucket_of[t]] for t in tables)
            if rule.memory < largest:
                raise ValueError(
                    f"{where}: memory is {rule.memory} bytes, must be at least {largest}, which "
                    "one row takes with its optimizer state"
                )
        if self._profile is None:
            self._reserve(rule, tables, where)
            return
        numbers_R, ids_R, _ = self._profile.ranking([self._tables.tables[t].name for t in tables])
        tables_R = np.array(tables)[numbers_R]
        bytes_R = np.array(self._row_bytes)[np.array(self._bucket_of)[tables_R]]
        if rule.top_k is not None:
            taken = tables_R[: rule.top_k], ids_R[: rule.top_k]
        elif rule.memory is not None:
            fits = int(np.searchsorted(np.cumsum(bytes_R), rule.memory, side="right"))
            taken = tables_R[:fits], ids_R[:fits]
        else:
            taken = self._worth(self._profile, tables)
        for t in tables:
            self._ids[t] = np.sort(taken[1][taken[0] == t])
        self._make_room(rule, tables)

    def _reserve(self, rule: HotRule, tables: list[int], where: str) -> None:
        """Makes room only, for want of a profile; adaptation fills it."""
        check_counts(rule, self._options, where)
        self._make_room(rule, tables)

    def _make_room(self, rule: HotRule, tables: list[int]) -> None:
        """Reserves places for what the rule allows, shared by the buckets as their features are."""
        features: dict[int, int] = {}
        for t in tables:
            k = self._bucket_of[t]
            features[k] = features.get(k, 0) + len(self._tables.tables[t].features)
        taken = {
            k: sum(len(self._ids[t]) for t in tables if self._bucket_of[t] == k) for k in features
        }
        cost = {k: 1 if rule.memory is None else self._row_bytes[k] for k in features}
        left = float(rule.top_k or rule.memory or 0) - sum(taken[k] * cost[k] for k in features)
        waiting = sum(features.values())
        for k in sorted(features, key=lambda k: (features[k], k)):
            # Of what is left, the last bucket gets what others could not use.
            more = max(int(left * features[k] / max(waiting, 1)) // cost[k], 0)
            self._room[k] += taken[k] + more
            left -= more * cost[k]
            waiting -= features[k]

    def _worth(
        self,
        profile: AccessProfile,
        tables: list[int],
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Returns the tables and ids of the rows that the cost model would replicate."""
        module, options = self._tables, self._options
        names = [module.tables[t].name for t in tables]
        numbers_R, ids_R, counts_R = _likeliest_first(profile, names, options.cost.batch_size)
        tables_R = np.array(tables)[numbers_R]
        owners = np.empty(len(ids_R), dtype=np.int64)
        for t in tables:
            own = tables_R == t
            owners[own] = np.searchsorted(module.tables[t].row_starts[1:-1], ids_R[own], "right")
        samples = max(profile.samples, 1)
        per_table = np.array([profile.accesses[name] for name in names]) / samples
        wire = np.array(self._wire_bytes)[np.array(self._bucket_of)]
        listed = np.array([counts_R[tables_R == t].sum() for t in tables]) / samples
        # Rows that the profile does not list are rare: each access is another row.
        rest = (per_table - listed).clip(0) * options.cost.batch_size
        rows = rows_to_replicate(
            RowUse(
                uses_R=counts_R / samples,
                bytes_R=wire[tables_R],
                owner_R=owners,
                table_R=numbers_R,
                uses_per_table=per_table,
                rest_requests=float(rest.sum()),
                rest_bytes=float((rest * wire[tables]).sum() / max(rest.sum(), 1e-9)),
            ),
            module.world_size,
            options.cost,
            options.sync_every,
            options.hot_batches,
        )
        return tables_R[:rows], ids_R[:rows]


def _likeliest_first(
    profile: AccessProfile, names: list[str], batch_size: int
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """Returns the rows of some tables as ``AccessProfile.ranking`` does, but likely ones first."""
    tables_R, ids_R, counts_R = profile.ranking(names)
    accesses_R = np.array([profile.accesses[name] for name in names])[tables_R]
    ids_of_batch_R = accesses_R / max(profile.samples, 1) * batch_size
    chances_R = chance_in_batch(counts_R / np.maximum(accesses_R, 1), ids_of_batch_R)
    order = likeliest_first(chances_R, tables_R, ids_R)
    return tables_R[order], ids_R[order], counts_R[order]
