"""What EmbeddingBagCollection and EmbeddingCollection share: the entry of fused tables."""

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torchrec.distributed.embedding_sharding import EmbeddingSharding, KJTListSplitsAwaitable
from torchrec.distributed.types import Awaitable, ParameterSharding
from torchrec.modules.embedding_configs import BaseEmbeddingConfig
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from fusedrec_torchrec.core.stages import stage
from fusedrec_torchrec.core.transfer import to_device
from fusedrec_torchrec.exchange.context import FusedShardingContext
from fusedrec_torchrec.exchange.features import CanonicalFeatures
from fusedrec_torchrec.exchange.input_dist import FusedInputDist, InputAwaitable
from fusedrec_torchrec.exchange.lookup import FusedLookup
from fusedrec_torchrec.exchange.options import ExchangeOptions
from fusedrec_torchrec.hot.index import EMPTY
from fusedrec_torchrec.hot.options import HotOptions, HotRule
from fusedrec_torchrec.sharding.embedding_sharding import FusedEmbeddingSharding
from fusedrec_torchrec.sharding.modules.batches_ahead import BatchesAhead
from fusedrec_torchrec.sharding.modules.end_of_data import EndOfData, PipelinedModule
from fusedrec_torchrec.sharding.plan_entries import FusedParameterSharding
from fusedrec_torchrec.sharding.sharding_type import FUSED

if TYPE_CHECKING:
    from fusedrec_torchrec.grid.gradients import SharedUpdates
    from fusedrec_torchrec.hot.rows import HotRows

__all__ = ["FusedPart", "KnownNames", "fused_parts"]


@dataclass
class KnownNames:
    """Names of all modules that a set of sharders has sharded.

    One module alone cannot tell a wrong name from another module's: a batch may hold features of
    several modules, and options may name tables of several.
    """

    features: set[str] = field(default_factory=set)
    tables: set[str] = field(default_factory=set)
    _ahead: BatchesAhead[PipelinedModule] = field(default_factory=lambda: BatchesAhead(EndOfData))

    def ahead(self) -> BatchesAhead[PipelinedModule]:
        """For a module that is sharded now; modules of a model share what this returns.

        All of them are sharded before the first batch, so one that comes later is of another model.
        """
        if self._ahead.has_begun:
            self._ahead = BatchesAhead(EndOfData)
        return self._ahead

    def check(self, options: ExchangeOptions, hot: HotOptions) -> None:
        """Refuses options that name tables which no module has; when all modules are sharded."""
        hashed = () if isinstance(options.hash_ids, bool) else options.hash_ids
        for name, tables in (
            ("hash_ids", hashed),
            ("hot.tables", hot.tables),
            ("table_codecs", options.table_codecs),
        ):
            unknown = sorted(set(tables) - self.tables)
            if unknown:
                raise ValueError(
                    f"{name} names table {unknown[0]!r}, must be among the fused tables "
                    f"{sorted(self.tables)}"
                )


class FusedPart:
    """The fused tables of a module, among its shardings.

    Args:
        configs: the module's tables.
        plan: how each of them is sharded.
        shardings: the module's shardings by type.
        lookups: the module's lookups, in the order of the shardings.
        options: settings of the fused exchange.
        hot: settings of hot rows.
        known: names of all modules that share their batches.
        weighted: whether ids carry weights.
        device: where batches are.
    """

    def __init__(
        self,
        configs: Sequence[BaseEmbeddingConfig],
        plan: Mapping[str, ParameterSharding],
        shardings: Mapping[str, EmbeddingSharding[Any, Any, Any, Any]],
        lookups: Sequence[nn.Module],
        options: ExchangeOptions,
        hot: HotOptions,
        known: KnownNames,
        weighted: bool,
        device: torch.device | None,
    ) -> None:
        device = device or torch.device("cpu")
        options = _planned(plan, options)
        self.index = list(shardings).index(FUSED)
        sharding = shardings[FUSED]
        assert isinstance(sharding, FusedEmbeddingSharding)
        sharding.options = options
        self._lookup = _lookup_of(lookups[self.index])
        sharding.replicate(_hot_rules(plan, hot), hot, self._lookup)
        self.hot = sharding.hot
        self.layout = sharding.layout
        self.wires = sharding.wires
        self.features = CanonicalFeatures(
            [name for sharding in shardings.values() for name in sharding.feature_names()],
            known=known.features,
            refuse_extra=options.extra_features == "error",
            weighted=weighted,
            beside_stock=len(shardings) > 1,
            device=device,
        )
        known.tables.update(table.name for table in self.layout.tables)
        self.options, self._hot_options = options, hot
        self._known: KnownNames | None = known
        self._stock_ids = StockIds(configs, plan, shardings, device)
        self._max_lengths: dict[str, int] = {}

    def hashed_tables(self) -> list[str]:
        """Names of tables whose ids are raw values."""
        return [table.name for table in self.layout.tables if self.options.hashes(table.name)]

    def synced_gradients(self) -> list[tuple[str, "HotRows | SharedUpdates"]]:
        """What sends gradients of rows to other ranks that have them, by its name."""
        found = [("hot", self.hot), ("grid", self._lookup.shared)]
        return [(name, each) for name, each in found if each is not None]

    def hot_ids(self) -> dict[str, torch.Tensor]:
        """Ids of the hot rows by table."""
        if self.hot is None:
            return {}
        keys = torch.cat(self.hot.index.home_keys)
        return self.layout.rows_of(keys[keys != EMPTY])

    def limit_lengths(self, max_lengths: Mapping[str, int]) -> None:
        """Refuses batches with more ids in a bag of a feature than the feature may have."""
        self._max_lengths = dict(max_lengths)
        no_limit = torch.iinfo(torch.int32).max
        limits = [self._max_lengths.get(feature, no_limit) for feature in self.features.names]
        self._max_lengths_S = to_device(limits, self.layout.device)

    def canonical(
        self, features: object, input_dists: Sequence[nn.Module], training: bool
    ) -> KeyedJaggedTensor:
        """The batch in canonical order; a bad one is replaced, and reported to all ranks."""
        input_dist = input_dists[self.index]
        assert isinstance(input_dist, FusedInputDist)
        input_dist.counts = training
        with stage("check"):
            return self._canonical(features, input_dists)

    def _canonical(self, features: object, input_dists: Sequence[nn.Module]) -> KeyedJaggedTensor:
        if self._known is not None:  # with the first batch, all modules are there
            self._known.check(self.options, self._hot_options)
            self._known = None
        input_dist = input_dists[self.index]
        assert isinstance(input_dist, FusedInputDist)
        try:
            batch = self.features(features)  # type: ignore[arg-type]
        except Exception as error:  # whatever it is, other ranks must not wait for us in vain
            text = str(error)
            if not isinstance(error, ValueError):
                text = f"{type(error).__name__}: {error}"
            bad = torch.ones((), dtype=torch.bool, device=self.layout.device)
            input_dist.report(bad, lambda: text)
            return self.features.stand_in(features)
        if self._max_lengths:
            input_dist.report(self._too_long(batch).any(), partial(self._describe_too_long, batch))
        if self._stock_ids.any_tables:
            input_dist.report(self._stock_ids.bad(batch), partial(self._stock_ids.describe, batch))
        return batch

    def _too_long(self, batch: KeyedJaggedTensor) -> torch.Tensor:
        """Which bags of the batch have too many ids."""
        strides_S = to_device(batch.stride_per_key(), self.layout.device)
        lengths = batch.lengths()
        return lengths > self._max_lengths_S.repeat_interleave(
            strides_S, output_size=lengths.numel()
        )

    def _describe_too_long(self, batch: KeyedJaggedTensor) -> str:
        where = int(self._too_long(batch).nonzero()[0])
        slot = bisect_right(list(accumulate(batch.stride_per_key())), where)
        feature = batch.keys()[slot]
        return (
            f"feature {feature!r}: a sample has {int(batch.lengths()[where])} ids, must have at "
            f"most {self._max_lengths[feature]}, the number of its position weights"
        )

    def context_of(self, awaitable: Awaitable[Any]) -> FusedShardingContext:
        """The context that the fused tables' input dist made for its batch."""
        assert isinstance(awaitable, KJTListSplitsAwaitable)
        header = awaitable.awaitables[self.index]
        assert isinstance(header, InputAwaitable)
        return header.context

    def end_of_data(self, input_dists: Sequence[nn.Module]) -> KeyedJaggedTensor:
        """A batch of no ids, which tells other ranks that this one's data has ended."""
        input_dist = input_dists[self.index]
        assert isinstance(input_dist, FusedInputDist)
        input_dist.report_end_of_data()
        return self.features.stand_in(None)


def fused_parts(model: nn.Module) -> list[tuple[str, FusedPart]]:
    """The fused tables of all modules of a sharded model, by the module's path."""
    found = [(path, getattr(module, "fused", None)) for path, module in model.named_modules()]
    return [(path, part) for path, part in found if isinstance(part, FusedPart)]


def _hot_rules(plan: Mapping[str, ParameterSharding], hot: HotOptions) -> dict[str, HotRule]:
    """The rules for single fused tables of a module."""
    rules = {}
    for name, sharding in plan.items():
        if sharding.sharding_type != FUSED:
            continue
        rule = hot.tables.get(name)
        if rule is None and isinstance(sharding, FusedParameterSharding):
            rule = sharding.hot_rows
        if rule is not None:
            rules[name] = rule
    return rules


def _planned(plan: Mapping[str, ParameterSharding], options: ExchangeOptions) -> ExchangeOptions:
    """Settings of the exchange, where the plan has its own.

    Raises:
        ValueError: tables of one exchange want different things.
    """
    wanted = {
        sharding.input_dist: name
        for name, sharding in plan.items()
        if isinstance(sharding, FusedParameterSharding) and sharding.input_dist is not None
    }
    if len(wanted) > 1:
        tables = " and ".join(f"{name!r} {how!r}" for how, name in wanted.items())
        raise ValueError(
            f"the plan has input_dist of table {tables}, must be the same for all fused tables of "
            "a module"
        )
    return replace(options, input_dist=next(iter(wanted))) if wanted else options


def _lookup_of(lookup: nn.Module) -> FusedLookup:
    assert isinstance(lookup, FusedLookup)
    return lookup


class StockIds:
    """Range checks for the ids of a module's stock tables.

    TorchRec leaves them to FBGEMM, which trains row 0 instead of a row that does not exist.
    """

    def __init__(
        self,
        configs: Sequence[BaseEmbeddingConfig],
        plan: Mapping[str, ParameterSharding],
        shardings: Mapping[str, EmbeddingSharding[Any, Any, Any, Any]],
        device: torch.device,
    ) -> None:
        self._smallest: dict[str, BaseEmbeddingConfig] = {}  # by feature, of its stock tables
        for config in configs:
            if plan[config.name].sharding_type == FUSED or config.use_virtual_table:
                continue
            for feature in config.feature_names:
                other = self._smallest.get(feature, config)
                self._smallest[feature] = min(config, other, key=lambda c: c.num_embeddings)
        self.any_tables = bool(self._smallest)
        no_limit = torch.iinfo(torch.int64).max
        limits = [
            no_limit
            if sharding_type == FUSED or feature not in self._smallest
            else self._smallest[feature].num_embeddings
            for sharding_type, sharding in shardings.items()
            for feature in sharding.feature_names()
        ]
        self._limits_S = torch.tensor(limits, device=device)
        self._checked_S = self._limits_S < no_limit

    def _bad_ids(self, batch: KeyedJaggedTensor) -> torch.Tensor:
        ids_N = batch.values()
        counts_S = to_device(batch.length_per_key(), ids_N.device)
        limits_N, checked_N = (
            values_S.repeat_interleave(counts_S, output_size=ids_N.numel())
            for values_S in (self._limits_S, self._checked_S)
        )
        return checked_N & ((ids_N < 0) | (ids_N >= limits_N))

    def bad(self, batch: KeyedJaggedTensor) -> torch.Tensor:
        """Whether any id is out of range, as a 0-dim tensor on the device."""
        return self._bad_ids(batch).any()

    def describe(self, batch: KeyedJaggedTensor) -> str:
        """The error message for the first out-of-range id."""
        where = int(self._bad_ids(batch).nonzero()[0])
        ends = list(accumulate(batch.length_per_key()))
        slot = bisect_right(ends, where)
        config = self._smallest[batch.keys()[slot]]
        position = where - (ends[slot - 1] if slot else 0)
        return (
            f"feature {batch.keys()[slot]!r} of table {config.name!r}: id "
            f"{int(batch.values()[where])} at position {position} is out of range "
            f"[0, {config.num_embeddings})"
        )
