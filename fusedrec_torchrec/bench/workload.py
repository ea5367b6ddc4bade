"""Makes a workload's model and batches, the same for every system."""

from dataclasses import dataclass

import numpy as np
import torch
from torchrec.modules.embedding_configs import EmbeddingBagConfig, EmbeddingConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor, KeyedTensor

from fusedrec_torchrec.access.access_profile import AccessProfile
from fusedrec_torchrec.access.samples import Samples, Source
from fusedrec_torchrec.access.synthetic import SyntheticData, SyntheticTable
from fusedrec_torchrec.bench.hot import HotWorkload
from fusedrec_torchrec.bench.models import Model, PerTableModel
from fusedrec_torchrec.bench.multi_hot import MultiHotSource
from fusedrec_torchrec.bench.suite import WorkloadConfig
from fusedrec_torchrec.training.data.prepared import PreparedData

__all__ = ["NEEDS", "Workload", "dims_of", "open_source", "outputs_of", "table_bytes"]

NEEDS = {
    "criteo": "needs data in Criteo's format: --data FILE_OR_FOLDER",
    "table": "needs data that `fusedrec prepare --config` has prepared: --table FOLDER",
}
BATCHES = 8
HOT_BATCHES = 4  # that are hot; there are fewer of these


@dataclass(frozen=True)
class Workload:
    """Holds what one rank trains on.

    Attributes:
        source: the data.
        dims: columns of each table.
        batches: this rank's batches, used in turn.
        hot: the data's hot rows; None if no system or batch is about them.
    """

    config: WorkloadConfig
    source: Source
    dims: list[int]
    batches: list[KeyedJaggedTensor]
    hot: HotWorkload | None = None

    @classmethod
    def make(
        cls, config: WorkloadConfig, source: Source, rank: int, hot_rows: bool = False
    ) -> "Workload":
        """Makes a rank's share of the data: batches of all ranks alternate.

        Args:
            config: the workload.
            source: its data.
            rank: whose share.
            hot_rows: whether a system needs to know the hot rows.

        Raises:
            ValueError: the data is too small for one batch of every rank.
        """
        size, ranks = config.batch_size, config.ranks
        hot = HotWorkload(config, source) if hot_rows or config.batches == "hot" else None
        if config.batches == "hot":
            assert hot is not None
            samples = hot.hot_samples(HOT_BATCHES * ranks * size)
            places = np.arange(len(samples)).reshape(HOT_BATCHES, ranks, size)[:, rank]
            names = list(source.table_rows)
            batches = [_batch(samples.take(place), names) for place in places]
            return cls(config, source, dims_of(config, len(names)), batches, hot)
        steps = min(BATCHES, source.samples // (size * ranks))
        if not steps:
            raise ValueError(
                f"workload {config.name!r}: {ranks} batches of {size} samples need "
                f"{ranks * size}, the data has {source.samples}"
            )
        rows = source.table_rows
        dims = dims_of(config, len(rows))
        starts = [(step * ranks + rank) * size for step in range(steps)]
        names = list(rows)
        batches = [_batch(source.read(start, start + size), names) for start in starts]
        return cls(config, source, dims, batches, hot)

    @property
    def table_rows(self) -> dict[str, int]:
        """Rows by table."""
        return self.source.table_rows

    def profile(self) -> AccessProfile:
        """Returns how rows and bags of the data are used."""
        hot = self.hot or HotWorkload(self.config, self.source)
        return hot.profile

    def model(self, per_table: bool = False) -> Model:
        """Returns the unsharded model, without memory for its tables.

        Args:
            per_table: whether each table is a collection of its own.
        """
        tables = [
            {"name": name, "num_embeddings": rows, "embedding_dim": dim, "feature_names": [name]}
            for (name, rows), dim in zip(self.table_rows.items(), self.dims, strict=True)
        ]
        meta = torch.device("meta")
        if self.config.module == "ec":
            configs = [EmbeddingConfig(**table) for table in tables]
            # An EmbeddingCollection has one dimension for all of its tables.
            return Model(EmbeddingCollection(tables=configs, device=meta))
        bag_configs = [EmbeddingBagConfig(**table) for table in tables]
        if per_table:
            return PerTableModel(
                [EmbeddingBagCollection(tables=[c], device=meta) for c in bag_configs]
            )
        return Model(EmbeddingBagCollection(tables=bag_configs, device=meta))


def table_bytes(config: WorkloadConfig, source: Source) -> int:
    """Returns the bytes of all tables."""
    rows = source.table_rows.values()
    return 4 * sum(n * dim for n, dim in zip(rows, dims_of(config, len(rows)), strict=True))


def dims_of(config: WorkloadConfig, tables: int) -> list[int]:
    """Returns the number of columns of each table."""
    return [config.dims[i % len(config.dims)] for i in range(tables)]


def open_source(config: WorkloadConfig, prepared: str | None) -> Source:
    """Opens the data of a workload.

    Args:
        config: the workload.
        prepared: folder of the prepared data that it is on; None if there is none.

    Raises:
        ValueError: there is none, or its features share tables or are bags.
    """
    if config.data != "zipf":
        if prepared is None:
            raise ValueError(f"workload {config.name!r} {NEEDS[config.data]}")
        data = PreparedData.open(prepared)
        if list(data.features.items()) != [(name, name) for name in data.table_rows]:
            raise ValueError(
                f"workload {config.name!r}: features of {prepared} share tables, must have one each"
            )
        if data.has_bags:
            raise ValueError(
                f"workload {config.name!r}: features of {prepared} are bags, must have one id each"
            )
        if not config.multi_hot:
            return data
        sizes = config.pooling_of(len(data.table_rows))
        return MultiHotSource(data, [int(size) for size in sizes])
    return SyntheticData(
        [
            SyntheticTable(
                name=f"table_{i}",
                rows=config.rows,
                zipf=config.zipf,
                pooling=config.pooling,
                bags=config.bags,
            )
            for i in range(config.tables)
        ],
        dense_features=1,
        samples=BATCHES * config.ranks * config.batch_size * (8 if config.batches == "hot" else 1),
    )


def _batch(samples: Samples, names: list[str]) -> KeyedJaggedTensor:
    size = len(samples)
    lengths = (
        torch.ones(len(names) * size, dtype=torch.int32)
        if samples.lengths is None
        else torch.from_numpy(samples.lengths).int().reshape(-1)
    )
    return KeyedJaggedTensor(
        keys=names, values=torch.from_numpy(samples.ids), lengths=lengths, stride=size
    )


def outputs_of(result: object) -> list[torch.Tensor]:
    """Waits for what a model returned, and returns its tensors."""
    if isinstance(result, list):  # of collections that were all called before
        return [tensor for part in result for tensor in outputs_of(part)]
    if hasattr(result, "wait"):
        result = result.wait()
    if isinstance(result, KeyedTensor):
        return [result.values()]
    assert isinstance(result, dict)
    values: list[JaggedTensor] = list(result.values())
    return [value.values() for value in values]
