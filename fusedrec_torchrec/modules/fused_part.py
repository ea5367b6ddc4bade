"""What EmbeddingBagCollection and EmbeddingCollection share: the entry of fused tables."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torchrec.distributed.embedding_sharding import EmbeddingSharding, KJTListSplitsAwaitable
from torchrec.distributed.types import Awaitable
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from fusedrec_torchrec.exchange.context import FusedShardingContext
from fusedrec_torchrec.exchange.features import CanonicalFeatures
from fusedrec_torchrec.exchange.input_dist import FusedInputDist, HeaderAwaitable
from fusedrec_torchrec.exchange.options import ExchangeOptions
from fusedrec_torchrec.sharding import FusedEmbeddingSharding
from fusedrec_torchrec.sharding_type import FusedShardingType

__all__ = ["FUSED", "FusedPart", "KnownNames"]

FUSED = FusedShardingType.FUSED_ROW_WISE.value


@dataclass
class KnownNames:
    """Names of all modules that a set of sharders has sharded.

    One module alone cannot tell a wrong name from another module's: a batch may hold features of
    several modules, and options may name tables of several.
    """

    features: set[str] = field(default_factory=set)
    tables: set[str] = field(default_factory=set)

    def check(self, options: ExchangeOptions) -> None:
        """Refuses options that name tables which no module has; when all modules are sharded."""
        if isinstance(options.hash_ids, bool):
            return
        unknown = sorted(set(options.hash_ids) - self.tables)
        if unknown:
            raise ValueError(
                f"hash_ids names table {unknown[0]!r}, must be among the fused tables "
                f"{sorted(self.tables)}"
            )


class FusedPart:
    """The fused tables of a module, among its shardings.

    Args:
        sharding_types: the module's sharding types.
        shardings: the module's shardings, one for each type.
        options: settings of the fused exchange.
        known: names of all modules that share their batches; this module's are added.
        weighted: whether ids carry weights.
        device: where batches are.
    """

    def __init__(
        self,
        sharding_types: Sequence[str],
        shardings: Sequence[EmbeddingSharding[Any, Any, Any, Any]],
        options: ExchangeOptions,
        known: KnownNames,
        weighted: bool,
        device: torch.device | None,
    ) -> None:
        self.index = list(sharding_types).index(FUSED)
        sharding = shardings[self.index]
        assert isinstance(sharding, FusedEmbeddingSharding)
        sharding.options = options
        self.layout = sharding.layout
        self.features = CanonicalFeatures(
            [name for sharding in shardings for name in sharding.feature_names()],
            known=known.features,
            refuse_extra=options.extra_features == "error",
            weighted=weighted,
            device=device or torch.device("cpu"),
        )
        known.features.update(self.features.names)
        known.tables.update(table.name for table in self.layout.tables)
        self._options = options
        self._known: KnownNames | None = known

    def canonical(self, features: object, input_dists: Sequence[nn.Module]) -> KeyedJaggedTensor:
        """The batch in canonical order; a bad one is replaced, and reported to all ranks."""
        if self._known is not None:  # with the first batch, all modules are there
            self._known.check(self._options)
            self._known = None
        input_dist = input_dists[self.index]
        assert isinstance(input_dist, FusedInputDist)
        try:
            return self.features(features)  # type: ignore[arg-type]
        except ValueError as error:
            input_dist.reject(str(error))
        except Exception as error:  # whatever it is, other ranks must not wait for us in vain
            input_dist.reject(f"{type(error).__name__}: {error}")
        return self.features.stand_in(features)

    def context_of(self, awaitable: Awaitable[Any]) -> FusedShardingContext:
        """The context that the fused tables' input dist made for its batch."""
        assert isinstance(awaitable, KJTListSplitsAwaitable)
        header = awaitable.awaitables[self.index]
        assert isinstance(header, HeaderAwaitable)
        return header.context
