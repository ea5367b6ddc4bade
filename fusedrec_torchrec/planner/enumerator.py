"""Sharding options of fused tables among TorchRec's own.

TorchRec's enumerator raises on sharding types it does not know.  To it, a fused option is the stock
one whose shards look the same; it gets its own name as soon as the options are made.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from torch import nn
from torchrec.distributed.planner.enumerators import EmbeddingEnumerator
from torchrec.distributed.planner.types import PartitionByType, Perf, Shard, ShardingOption
from torchrec.distributed.types import ModuleSharder, ShardingType

from fusedrec_torchrec.access.access_profile import AccessProfile
from fusedrec_torchrec.exchange.buckets import kernels_of
from fusedrec_torchrec.planner.cost.fusing import fusing_pays, likely_load, who_pools
from fusedrec_torchrec.planner.cost.table_load import TableLoad
from fusedrec_torchrec.planner.fit_tables import unfit_tables, unowned_tables
from fusedrec_torchrec.planner.model_tables import table_loads
from fusedrec_torchrec.planner.option_load import is_fused, option_load
from fusedrec_torchrec.sharding.plan_entries import owner_shards
from fusedrec_torchrec.sharding.sharding_type import (
    FUSED,
    FUSED_COLUMN_WISE,
    FUSED_TABLE_WISE,
    FUSED_TYPES,
    LOOKS_LIKE,
    OWNER_POOLED,
)

__all__ = ["FusedEnumerator", "stock_name"]

# Stock shardings do what the fused ones with such shards do, in more collectives and bytes.
# TorchRec's estimators count otherwise than ours, so their seconds cannot be compared.
NO_FASTER = 1.05
# What a choice that sends more rows costs at least, to the better one's time.  Where bags were
# counted, balance is no reason to send more of them; memory still is.
SECOND_BEST, SECOND_BEST_COUNTED = 1.5, 100.0


class _StockName(str):
    """Is the name of a stock sharding, and by its class and attribute a fused one."""

    fused: str


def stock_name(fused: str) -> str:
    """Returns the name of the stock sharding whose shards look like those of a fused one."""
    name = _StockName(LOOKS_LIKE[fused])
    name.fused = fused
    return name


class FusedEnumerator(EmbeddingEnumerator):
    """Is TorchRec's ``EmbeddingEnumerator`` that knows fused shardings, with its arguments.

    Args:
        *args: those of ``EmbeddingEnumerator``.
        profile: how rows and bags are used.
        zipf: exponent of a Zipf law that says how rows are used, for all tables or by table.
        known_loads: takes what tables are asked for, if a profile or a law tells.
        **kwargs: those of ``EmbeddingEnumerator``.
    """

    def __init__(
        self,
        *args: Any,
        profile: AccessProfile | None = None,
        zipf: Mapping[str, float] | float | None = None,
        known_loads: dict[str, TableLoad] | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        self._profile, self._zipf = profile, zipf
        # Of the module whose options are being made; TorchRec asks for each of its tables.
        self._cannot_be_fused: set[str] = set()
        self._cannot_be_owned: set[str] = set()
        self._known_loads = {} if known_loads is None else known_loads

    def enumerate(
        self, module: nn.Module, sharders: list[ModuleSharder[nn.Module]]
    ) -> list[ShardingOption]:
        self._cannot_be_fused = unfit_tables(module, sharders, self._compute_device)
        self._cannot_be_owned = unowned_tables(module, sharders)
        if self._profile is not None or self._zipf is not None:
            loads = table_loads(module, sharders, self._profile, self._zipf, self._constraints)
            self._known_loads.clear()
            self._known_loads.update({load.name: load for load in loads})
        options = super().enumerate(module, sharders)
        tables: dict[tuple[str, str], list[ShardingOption]] = {}
        for option in options:
            tables.setdefault((option.path, option.name), []).append(option)
        owned = self._owned(tables)
        return [
            option for key, same in tables.items() for option in self._sensible(same, key in owned)
        ]

    def _owned(
        self, tables: Mapping[tuple[str, str], Sequence[ShardingOption]]
    ) -> set[tuple[str, str]]:
        """Returns the tables whose owners had better pool."""
        can = {
            key: self._load(options[0])
            for key, options in tables.items()
            if any(option.sharding_type in OWNER_POOLED for option in options)
        }
        owned: set[tuple[str, str]] = set()
        for path in dict.fromkeys(path for path, _ in can):
            keys = [key for key in can if key[0] == path]
            loads = [can[key] for key in keys]
            pooled = who_pools(loads, self._batch, rows_known=self.knows_rows)
            owned |= {key for key, is_owned in zip(keys, pooled, strict=True) if is_owned}
        return owned

    @property
    def knows_rows(self) -> bool:
        """Whether a profile or a law says how often rows come; if not, a law is assumed."""
        return bool(self._known_loads)

    def expected_load(self, option: ShardingOption) -> tuple[TableLoad, int]:
        """Returns what an option's table is expected to be asked for, and by how many samples.

        This is what decides who pools.
        """
        load = self._load(option)
        return load if self.knows_rows else likely_load(load), self._batch

    def _load(self, option: ShardingOption) -> TableLoad:
        """Returns what ``_batch`` samples ask of an option's table."""
        return self._known_loads.get(option.name) or option_load(option, self._constraints)

    @property
    def _batch(self) -> int:
        return self._batch_size if self._known_loads else 1

    def _sensible(self, options: Sequence[ShardingOption], owned: bool) -> list[ShardingOption]:
        """Returns the options of a table that are worth a thought; the only choice always is."""
        if not any(option.sharding_type in OWNER_POOLED for option in options):
            mine = (self._constraints or {}).get(options[0].name)
            asked = mine is not None and mine.sharding_types == [FUSED]
            pays = asked or fusing_pays(self._load(options[0]), self._batch)
            return [option for option in options if pays or not is_fused(option)]
        best = [o for o in options if is_fused(o) and (o.sharding_type in OWNER_POOLED) == owned]
        counted = self._load(options[0]).bags_are_counted
        second = SECOND_BEST_COUNTED if counted else SECOND_BEST
        longest = max((option.total_perf for option in best), default=0.0)
        for option in options:
            if is_fused(option) and option not in best:
                _slow_down(option, second * longest)
            elif option.sharding_type in LOOKS_LIKE.values():
                _slow_down(option, NO_FASTER * longest)
        return list(options)

    def populate_estimates(self, sharding_options: list[ShardingOption]) -> None:
        for option in sharding_options:
            if isinstance(option.sharding_type, _StockName):
                option.sharding_type = option.sharding_type.fused
            if option.sharding_type == FUSED_COLUMN_WISE:
                self._split_columns(option)
            if (
                option.name in self._known_loads
            ):  # ids of a bag, which estimates and placement go by
                bags = len(option.input_lengths)
                option.input_lengths = [self._known_loads[option.name].pooling / bags] * bags
        super().populate_estimates(sharding_options)

    def _split_columns(self, option: ShardingOption) -> None:
        """Gives a table equal columns on as many ranks as can have them."""
        rows, dim = option.tensor.shape
        can = [n for n in range(1, self._world_size + 1) if dim % (4 * n) == 0]
        owners = range(max(can, default=1))
        shards = owner_shards(FUSED_COLUMN_WISE, rows, dim, owners, self._world_size)
        option.shards = [Shard(size=list(size), offset=list(offset)) for offset, size in shards]
        if len(shards) == self._world_size:  # so that no rank gets two of them
            option.partition_by = PartitionByType.UNIFORM.value

    def _filter_sharding_types(
        self, name: str, allowed_sharding_types: list[str], sharder_key: str = ""
    ) -> list[str]:
        constraints = (self._constraints or {}).get(name)
        asked = (constraints and constraints.sharding_types) or []
        row_wise = ShardingType.ROW_WISE.value
        if row_wise in asked and row_wise not in allowed_sharding_types:
            # TorchRec's sharders do not offer it on CPU, where it works, too.
            allowed_sharding_types = [*allowed_sharding_types, row_wise]
        types = super()._filter_sharding_types(name, allowed_sharding_types, sharder_key)
        # What a table cannot be is an error if nothing else is asked for.
        if name in self._cannot_be_fused:
            types = [t for t in types if t not in FUSED_TYPES] or types
        if name in self._cannot_be_owned:
            types = [t for t in types if t not in OWNER_POOLED] or types
        if FUSED_TABLE_WISE in types:  # and with it all that stock shardings can
            types = [t for t in types if t in (*FUSED_TYPES, *asked)]
        # Sorted: TorchRec's own order is that of a set, which differs from run to run.
        return [stock_name(t) if t in FUSED_TYPES else t for t in sorted(types)]

    def _filter_compute_kernels(
        self, name: str, allowed_compute_kernels: list[str], sharding_type: str
    ) -> list[str]:
        if isinstance(sharding_type, _StockName):
            kernels = kernels_of(self._compute_device)
            allowed_compute_kernels = [k for k in allowed_compute_kernels if k in kernels]
        kernels = super()._filter_compute_kernels(name, allowed_compute_kernels, sharding_type)
        return sorted(kernels)


def _slow_down(option: ShardingOption, least: float) -> None:
    """Makes an option take at least so long, so that it is chosen for memory or balance only."""
    factor = least / max(option.total_perf, 1e-300)
    for shard in option.shards if factor > 1 else ():
        assert shard.perf is not None
        parts = asdict(shard.perf)
        shard.perf = Perf(**{k: v * factor if v is not None else v for k, v in parts.items()})
