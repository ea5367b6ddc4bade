"""Counts how rows and bags are used in batches that a training script has at hand.

``fusedrec profile`` does it for data in files.  Here the batches are TorchRec's own, so that a few
of them, taken from any data loader, tell the planner how long bags are and how often they repeat.
"""

from collections.abc import Iterable, Sequence, Set
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from torchrec.distributed.types import ModuleSharder
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from fusedrec_torchrec.access.access_profile import COUNTERS, AccessProfile
from fusedrec_torchrec.access.recorder import Recorder
from fusedrec_torchrec.exchange.hashing import hash_ids, table_salt
from fusedrec_torchrec.exchange.options import ExchangeOptions
from fusedrec_torchrec.planner.fit_tables import configs_of
from fusedrec_torchrec.sharding.shardable_modules import shardable_modules
from fusedrec_torchrec.sharding.sharders import fused_sharders

__all__ = ["profile_batches"]


class _Table(NamedTuple):
    """Describes a table whose accesses are counted."""

    name: str
    rows: int
    features: list[str]


def profile_batches(
    module: nn.Module,
    batches: Iterable[KeyedJaggedTensor],
    sharders: Sequence[ModuleSharder[nn.Module]] | None = None,
    options: ExchangeOptions | None = None,
    counters: int = COUNTERS,
) -> AccessProfile:
    """Returns an access profile of some batches, for ``FusedShardingPlanner(profile=...)``.

    A few thousand samples tell how long bags are and how often they repeat; which rows are hot
    takes more.  How often bags repeat is counted in batches of 64 samples and more, as long as
    there are enough of them: fewer samples in all do not tell, and as many as a training step has
    tell best.  Weights of ids are not looked at, so bags that differ in them only count as equal.
    Only the rank that plans needs the profile, which is rank 0 in ``collective_plan``.

    Args:
        module: the model, unsharded.
        batches: as they are fed to the model; each has all features of its tables.
        sharders: those that the planner gets; ``fused_sharders()`` if None.
        options: settings of the exchange, for the ids that it hashes.
        counters: most rows that are counted at a time, of all tables together.

    Raises:
        ValueError: there are no batches, a feature is missing, or an id is out of range.
    """
    options = options or ExchangeOptions()
    tables = _tables_of(module, sharders or fused_sharders())
    recorder = Recorder({table.name: table.rows for table in tables}, counters)
    samples = 0
    for number, batch in enumerate(batches):
        if batch.variable_stride_per_key():
            raise ValueError(
                f"batch {number} has another number of samples for each feature, must have the "
                "same for all: profile the batch before samples of features are left out"
            )
        size = batch.stride()
        keys = set(batch.keys())
        for table in tables:
            _check_features(table, keys, number)
        of_tables = [_accesses(batch, number, table, options) for table in tables]
        ids, lengths = zip(*of_tables, strict=True)
        if size:
            recorder.add(ids, size, lengths)
        samples += size
    if not samples:
        raise ValueError("batches have no samples, must have at least one")
    return recorder.profile()


def _tables_of(module: nn.Module, sharders: Sequence[ModuleSharder[nn.Module]]) -> list[_Table]:
    """Returns the tables of a model that sharders can shard."""
    tables = [
        _Table(config.name, config.num_embeddings, list(config.feature_names))
        for _, child, _ in shardable_modules(module, sharders)
        for config in configs_of(child)
    ]
    names = [table.name for table in tables]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ValueError(f"two tables have the name {twice[0]!r}; the planner needs one each")
    if not tables:
        raise ValueError(
            f"module is a {type(module).__name__} without tables, must have an "
            "EmbeddingBagCollection or an EmbeddingCollection that is not sharded yet"
        )
    return tables


def _check_features(table: _Table, keys: Set[str], number: int) -> None:
    """Refuses a batch without a feature of a table."""
    for name in table.features:
        if name not in keys:
            raise ValueError(
                f"batch {number} has no feature {name!r} of table {table.name!r}; it has "
                f"{', '.join(sorted(keys))}"
            )


def _accesses(
    batch: KeyedJaggedTensor, number: int, table: _Table, options: ExchangeOptions
) -> tuple[NDArray[np.int64], NDArray[np.integer[Any]]]:
    """Returns the ids of a table, feature after feature, and the lengths of their bags."""
    features = [batch[name] for name in table.features]
    ids = torch.cat([feature.values() for feature in features]).cpu().long()
    lengths = torch.cat([feature.lengths() for feature in features]).cpu()
    if options.hashes(table.name):
        salt = torch.tensor(table_salt(table.name, options.hash_seed))
        ids = hash_ids(ids, salt, torch.tensor(table.rows))
    bad = ((ids < 0) | (ids >= table.rows)).nonzero()
    if len(bad):
        raise ValueError(
            f"batch {number} has the id {int(ids[bad[0]])} of table {table.name!r}, must be in "
            f"[0, {table.rows})"
        )
    return ids.numpy(), lengths.numpy()
