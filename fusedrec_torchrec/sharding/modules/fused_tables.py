"""The fused tables of a module: what becomes of a batch before and after TorchRec's input dist.

EmbeddingBagCollection and EmbeddingCollection have it in common.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from torchrec.distributed.embedding_sharding import (
    EmbeddingSharding,
    EmbeddingShardingInfo,
    KJTListAwaitable,
    KJTListSplitsAwaitable,
)
from torchrec.distributed.embedding_types import KJTList
from torchrec.distributed.types import Awaitable, ParameterSharding
from torchrec.modules.embedding_configs import BaseEmbeddingConfig
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from fusedrec_torchrec.core.stages import stage
from fusedrec_torchrec.exchange.checks import Report
from fusedrec_torchrec.exchange.context import FusedShardingContext, ReceivedRows
from fusedrec_torchrec.exchange.early_dist import EarlyDist
from fusedrec_torchrec.exchange.features import CanonicalFeatures
from fusedrec_torchrec.exchange.input_dist import FusedInputDist
from fusedrec_torchrec.exchange.outgoing_batch import BatchNotes, InputAwaitable, ReceivedOnce
from fusedrec_torchrec.hot.index import EMPTY
from fusedrec_torchrec.hot.rows import HotRows
from fusedrec_torchrec.sharding.embedding_sharding import FusedEmbeddingSharding
from fusedrec_torchrec.sharding.modules.length_limits import LengthLimits
from fusedrec_torchrec.sharding.modules.stock_ids import StockIds
from fusedrec_torchrec.sharding.sharding_type import FUSED, FUSED_TYPES

__all__ = ["CheckNames", "FusedTables", "fused_tables_of", "with_one_fused_type"]

# Refuses what can only be known when all modules are sharded.
CheckNames = Callable[[], None]


class FusedTables:
    """The fused tables of a module, among its shardings.

    Args:
        configs: the module's tables.
        plan: how each of them is sharded.
        shardings: the module's shardings by type.
        known_features: of all modules that share batches with this one; may still grow.
        check_names: called with the first batch.
        on_uneven: called before the error is raised that some ranks have run out of batches.
        weighted: whether ids carry weights.
        device: where batches are.
    """

    def __init__(
        self,
        configs: Sequence[BaseEmbeddingConfig],
        plan: Mapping[str, ParameterSharding],
        shardings: Mapping[str, EmbeddingSharding[Any, Any, Any, Any]],
        known_features: set[str],
        check_names: CheckNames,
        on_uneven: Callable[[], None],
        weighted: bool,
        device: torch.device | None,
    ) -> None:
        device = device or torch.device("cpu")
        self.index = list(shardings).index(FUSED)
        sharding = shardings[FUSED]
        assert isinstance(sharding, FusedEmbeddingSharding)
        self.options = sharding.settings.options
        self.layout = sharding.layout
        self.tables = sharding.tables
        self._owner_pooled = [t.name for t in self.tables.of(self.tables.bag_buckets)]
        self.wires = sharding.wires
        self.replications = sharding.lookup.replication.members
        self._sharding = sharding
        processed = sharding.settings.processed
        # Whose weights come from the batch, and not from feature processors.
        self._stock_weighted = [
            config.name
            for config in configs
            if processed is None and plan[config.name].sharding_type not in FUSED_TYPES
        ]
        self.features = CanonicalFeatures(
            [name for sharding in shardings.values() for name in sharding.feature_names()],
            known=known_features,
            refuse_extra=self.options.extra_features == "error",
            weighted=weighted,
            needs_weights=weighted and processed is None,
            beside_stock=len(shardings) > 1,
            device=device,
            counted=not sharding.counted_on_device or len(shardings) > 1,
            any_order=sharding.takes_any_order,
        )
        self._check_names: CheckNames | None = check_names
        self._forget_batches = on_uneven
        self._checks: list[StockIds | LengthLimits] = []
        if processed is not None and processed.max_lengths:
            names = self.features.names
            self._checks.append(LengthLimits(processed.max_lengths, names, device))
        stock_ids = StockIds(configs, plan, shardings, device)
        if stock_ids.any_tables:
            self._checks.append(stock_ids)

    def hashed_tables(self) -> list[str]:
        """Returns the names of tables whose ids are raw values."""
        return [table.name for table in self.tables.tables if self.options.hashes(table.name)]

    @property
    def hot(self) -> HotRows | None:
        """The hot rows of the tables; None if there are none."""
        return next(
            (replication for replication in self.replications if isinstance(replication, HotRows)),
            None,
        )

    def hot_ids(self) -> dict[str, torch.Tensor]:
        """Returns the ids of the hot rows by table."""
        if self.hot is None:
            return {}
        keys = torch.cat(self.hot.index.home_keys)
        return self.layout.rows_of(keys[keys != EMPTY])

    def input_dist(self, input_dists: Sequence[nn.Module]) -> FusedInputDist:
        """Returns the input dist of the fused tables among those of the module."""
        input_dist = input_dists[self.index]
        assert isinstance(input_dist, FusedInputDist)
        return input_dist

    def canonical(self, features: object, training: bool) -> tuple[KeyedJaggedTensor, BatchNotes]:
        """Returns the batch in canonical order; a bad one is replaced, and reported to all ranks.

        Args:
            features: what the module was called with.
            training: whether the module is in training.
        """
        with stage("check"):
            if self._check_names is not None:  # with the first batch, all modules are there
                self._check_names()
                self._check_names = None
            reports: list[Report] = []
            refused: torch.Tensor | None = None
            try:
                batch, told = self.features(features)
                self._check_weights(batch)
            except Exception as error:  # whatever it is, other ranks must not wait for us in vain
                text = str(error)
                if not isinstance(error, ValueError):
                    text = f"{type(error).__name__}: {error}"
                bad = torch.ones((), dtype=torch.bool, device=self.layout.device)
                reports.append((bad, lambda: text))
                batch = self.features.stand_in(features)
            else:
                refused = told.refused
                reports += told.reports
                reports += [
                    (check.bad(batch), partial(check.describe, batch)) for check in self._checks
                ]
            return batch, self._notes(training, reports=reports, refused=refused)

    def _check_weights(self, batch: KeyedJaggedTensor) -> None:
        """Refuses weights whose gradients are wanted where only owners could give them.

        TorchRec splits a batch for several shardings without gradients, and sends it so.
        """
        weights = batch.weights_or_none()
        if weights is None or not weights.requires_grad or not torch.is_grad_enabled():
            return
        for names, why in (
            (
                self._owner_pooled,
                "whose owners pool: the gradients of weights need the rows, which stay with their "
                "owner",
            ),
            (
                self._stock_weighted,
                "which are not fused: beside them TorchRec loses the gradients of all weights",
            ),
        ):
            if names:
                raise ValueError(
                    f"weights require gradients, must not with tables {names}, {why}; make these "
                    f"tables {FUSED}, or detach the weights"
                )

    def end_of_data(self, training: bool) -> tuple[KeyedJaggedTensor, BatchNotes]:
        """Returns a batch of no ids, which tells other ranks that this one's data has ended."""
        return self.features.stand_in(None), self._notes(training, end_of_data=True)

    def _notes(self, training: bool, **notes: Any) -> BatchNotes:
        return BatchNotes(training=training, on_uneven=self._forget, **notes)

    def _forget(self) -> None:
        """Forgets batches that were sent and will never be looked up, as all ranks do."""
        self._forget_batches()
        for replication in self.replications:
            replication.forget()

    def context_of(self, awaitable: Awaitable[Any]) -> FusedShardingContext:
        """Returns the context that the fused tables' input dist made for its batch."""
        assert isinstance(awaitable, KJTListSplitsAwaitable)
        header = awaitable.awaitables[self.index]
        assert isinstance(header, InputAwaitable)
        return header.context

    def received_of(self, awaitable: Awaitable[Any]) -> ReceivedOnce:
        """Returns what owners are asked for, of a batch whose headers have been read."""
        assert isinstance(awaitable, KJTListAwaitable)
        received = awaitable.awaitables[self.index]
        assert isinstance(received, ReceivedOnce)
        return received

    def create_early_dist(self) -> EarlyDist | None:
        """Makes what sends rows of the next batch early; None if all travel late.

        Raises:
            ValueError: rows may change that the current batch does not ask for.
        """
        return self._sharding.create_early_dist()

    def take_context(self, contexts: list[Any], received: KJTList) -> None:
        """Makes the context of the fused tables that of the batch which has arrived.

        A pipeline that is attached again sends a batch once more, and then looks up what had
        arrived before.
        """
        rows = received[self.index]
        assert isinstance(rows, ReceivedRows)
        contexts[self.index] = rows.context


def with_one_fused_type(
    grouped: Mapping[str, list[EmbeddingShardingInfo]], order: Sequence[str]
) -> dict[str, list[EmbeddingShardingInfo]]:
    """Puts the fused tables of all types together, in the place of the first.

    Args:
        grouped: tables by sharding type.
        order: names of the module's tables.
    """
    fused = [info for kind, infos in grouped.items() if kind in FUSED_TYPES for info in infos]
    fused.sort(key=lambda info: order.index(info.embedding_config.name))
    joined: dict[str, list[EmbeddingShardingInfo]] = {}
    for kind, infos in grouped.items():
        joined.setdefault(
            FUSED if kind in FUSED_TYPES else kind, fused if kind in FUSED_TYPES else infos
        )
    return joined


def fused_tables_of(model: nn.Module) -> list[tuple[str, FusedTables]]:
    """Returns the fused tables of all modules of a sharded model, by the module's path."""
    modules = [(path, getattr(module, "fused", None)) for path, module in model.named_modules()]
    return [(path, fused) for path, fused in modules if isinstance(fused, FusedTables)]
