"""Buckets: which tables share one physical FBGEMM table, and what such a table can do.

A *bucket* holds the tables that share dimension, data type, optimizer with its settings, placement,
and who pools them.  Buckets that only differ in who pools are in the same physical table.  On every
rank its rows are the tables' local shards one after another, first those of rows that travel.
"""

import dataclasses
import logging
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType, SparseType
from torchrec.distributed.embedding_sharding import group_tables
from torchrec.distributed.embedding_types import (
    EmbeddingComputeKernel,
    GroupedEmbeddingConfig,
    ShardedEmbeddingTable,
)
from torchrec.modules.embedding_configs import PoolingType, data_type_to_sparse_type

from fusedrec_torchrec.compat.optimizers import OPTIMIZERS, optimizers_of

__all__ = [
    "Bucket",
    "BucketConfig",
    "BucketedTables",
    "PhysicalTable",
    "TableShards",
    "check_bucket",
    "group_into_buckets",
    "kernels_of",
    "physical_tables",
    "slot_names",
]

logger = logging.getLogger(__name__)

INT32_MAX = torch.iinfo(torch.int32).max
CPU_KERNELS = (EmbeddingComputeKernel.FUSED,)
CUDA_KERNELS = (
    *CPU_KERNELS,
    EmbeddingComputeKernel.FUSED_UVM,
    EmbeddingComputeKernel.FUSED_UVM_CACHING,
)
DATA_TYPES = (SparseType.FP32, SparseType.FP16)


@dataclass(frozen=True)
class BucketConfig:
    """The tables of a bucket, as TorchRec describes them.

    Attributes:
        config: all tables, each by its first shard.
        per_rank: for each rank the shards that it has.
        owner_pooled: whether the owners of its tables pool bags; if not, requesters do.
        physical: number of the physical table that it is in.
    """

    config: GroupedEmbeddingConfig
    per_rank: list[GroupedEmbeddingConfig]
    owner_pooled: bool
    physical: int


@dataclass(frozen=True)
class PhysicalTable:
    """One FBGEMM table on every rank.

    Attributes:
        config: all tables in it, each by its first shard.
        per_rank: for each rank the shards that it has.
        rows: number of its bucket whose rows travel; None if there is none.
        bags: number of its bucket whose owners pool; None if there is none.
    """

    config: GroupedEmbeddingConfig
    per_rank: list[GroupedEmbeddingConfig]
    rows: int | None
    bags: int | None

    @property
    def buckets(self) -> list[int]:
        """The numbers of its buckets."""
        return [number for number in (self.rows, self.bags) if number is not None]


def physical_tables(buckets: Sequence[BucketConfig]) -> list[PhysicalTable]:
    """Returns the physical tables that buckets are in."""
    tables = []
    for physical in sorted({bucket.physical for bucket in buckets}):
        rows, bags = (
            next(
                (
                    k
                    for k, bucket in enumerate(buckets)
                    if (bucket.physical, bucket.owner_pooled) == (physical, owner_pooled)
                ),
                None,
            )
            for owner_pooled in (False, True)
        )
        own = [buckets[k] for k in (rows, bags) if k is not None]
        tables.append(
            PhysicalTable(
                _joined([bucket.config for bucket in own]),
                [
                    _joined(list(of_rank))
                    for of_rank in zip(*(b.per_rank for b in own), strict=True)
                ],
                rows,
                bags,
            )
        )
    return tables


def _joined(configs: Sequence[GroupedEmbeddingConfig]) -> GroupedEmbeddingConfig:
    tables = [table for config in configs for table in config.embedding_tables]
    return dataclasses.replace(configs[0], embedding_tables=tables)


def group_into_buckets(
    tables_per_rank: Sequence[Sequence[ShardedEmbeddingTable]],
    max_rows: int = INT32_MAX,
    codecs: Mapping[str, object] | None = None,
    frozen: Collection[str] = (),
    owner_pooled: Collection[str] = (),
    order: Sequence[str] = (),
) -> list[BucketConfig]:
    """Groups tables into buckets, those that are pooled by their owners last.

    TorchRec's own ``group_tables`` keeps apart data types and optimizer settings.  It also
    keeps poolings apart, which are all sums here, and mixes dimensions and placements, which one
    physical table cannot: hence the neutral pooling and the partition before it.
    A bucket is split where its rows on some rank would not fit an int32 row number.  Tables whose
    ``codecs`` differ have buckets of their own, and so have ``frozen`` ones.

    Args:
        tables_per_rank: the shards of each rank, at most one of a table.
        max_rows: of a bucket on one rank.
        codecs: how rows travel, by table.
        frozen: tables that are not trained.
        owner_pooled: tables whose owners pool bags.
        order: of tables in a bucket; as ranks have them if empty.
    """
    shards: dict[str, dict[int, ShardedEmbeddingTable]] = {name: {} for name in order}
    for rank, tables in enumerate(tables_per_rank):
        for table in tables:
            shards.setdefault(table.name, {})[rank] = table
    ranks = len(tables_per_rank)
    assert all(shards.values()), "a table without a shard"
    partitions: dict[tuple[object, ...], list[list[str]]] = {}  # tables of a physical one
    rows_so_far: dict[tuple[object, ...], list[int]] = {}
    for name in sorted(shards, key=lambda name: name in owner_pooled):  # is stable
        first = next(iter(shards[name].values()))
        kind = (
            *(first.local_cols, first.compute_kernel),
            *((codecs or {}).get(name), name in frozen),
        )
        local_rows = [shards[name][r].local_rows if r in shards[name] else 0 for r in range(ranks)]
        if max(local_rows) > max_rows:
            raise ValueError(
                f"table {name!r} has {max(local_rows)} rows on one rank, must be at most "
                f"{max_rows}: use more ranks or even row ranges"
            )
        so_far = rows_so_far.get(kind, [0] * ranks)
        total = [a + b for a, b in zip(so_far, local_rows, strict=True)]
        members = partitions.setdefault(kind, [[]])
        if max(total) > max_rows:
            members.append([])
            total = local_rows
        members[-1].append(name)
        rows_so_far[kind] = total
    configs = [
        config
        for members in partitions.values()
        for names in members
        for config in _grouped(names, shards)
    ]
    buckets = [
        _bucket(config, own, shards, ranks, pooled, physical)
        for physical, config in enumerate(configs)
        for pooled in (False, True)
        if (own := [t for t in config.embedding_tables if (t.name in owner_pooled) == pooled])
    ]
    return sorted(buckets, key=lambda bucket: bucket.owner_pooled)


def _grouped(
    names: Sequence[str], shards: Mapping[str, Mapping[int, ShardedEmbeddingTable]]
) -> list[GroupedEmbeddingConfig]:
    """Returns tables of one kind, by first shards; TorchRec may have reasons to keep some apart."""
    (configs,) = group_tables([[_neutral(next(iter(shards[name].values()))) for name in names]])
    return list(configs)


def _neutral(shard: ShardedEmbeddingTable) -> ShardedEmbeddingTable:
    return dataclasses.replace(shard, pooling=PoolingType.SUM)


def _bucket(
    config: GroupedEmbeddingConfig,
    tables: list[ShardedEmbeddingTable],
    shards: Mapping[str, Mapping[int, ShardedEmbeddingTable]],
    ranks: int,
    owner_pooled: bool,
    physical: int,
) -> BucketConfig:
    per_rank = [
        dataclasses.replace(
            config,
            embedding_tables=[
                _neutral(shards[table.name][rank]) for table in tables if rank in shards[table.name]
            ],
        )
        for rank in range(ranks)
    ]
    whole = dataclasses.replace(config, embedding_tables=tables)
    return BucketConfig(whole, per_rank, owner_pooled, physical)


@dataclass(frozen=True)
class Bucket:
    """A bucket as the exchange sees it.

    Attributes:
        dim: columns.
        row_bytes: memory of a row on its rank, weights and optimizer state together.
        wire_bytes: of a row that travels as it is looked up.
        first_table, end_table: its range of tables.
        first_slot, end_slot: its range of slots.
        owner_pooled: whether owners pool bags; if not, rows travel.
    """

    dim: int
    row_bytes: int
    wire_bytes: int
    first_table: int
    end_table: int
    first_slot: int
    end_slot: int
    owner_pooled: bool = False


@dataclass(frozen=True)
class TableShards:
    """A table as the exchange sees it.

    Attributes:
        name: of the table.
        rows: of the whole table.
        features: that look it up.
        row_starts: rank ``r`` owns rows ``[row_starts[r], row_starts[r + 1])``; of a table that
            requesters pool.
        owners: the ranks of its columns, in the order of the columns; of a table that they pool.
        first_rows: where its rows begin in the physical table of each of these owners.
    """

    name: str
    rows: int
    features: tuple[str, ...]
    row_starts: tuple[int, ...] = ()
    owners: tuple[int, ...] = ()
    first_rows: tuple[int, ...] = ()


class BucketedTables:
    """All fused tables of a module, bucket after bucket, with what each rank owns of them.

    A *slot* is a pair of a feature and a table that it looks up.

    Args:
        configs: the buckets, those that owners pool last.
    """

    def __init__(self, configs: Sequence[BucketConfig]) -> None:
        self.world_size = len(configs[0].per_rank)
        self.buckets: list[Bucket] = []
        self.tables: list[TableShards] = []
        slots = 0
        for bucket in configs:
            first_table, first_slot = len(self.tables), slots
            if bucket.owner_pooled:
                self.tables += _bag_shards(bucket, _rows_before(bucket, configs))
            else:
                self.tables += _row_shards(bucket)
            slots += bucket.config.num_features()
            dim = bucket.config.embedding_tables[0].local_cols
            self.buckets.append(
                Bucket(
                    dim=dim,
                    row_bytes=_row_bytes(bucket.config, dim),
                    wire_bytes=dim * _output_type(bucket.config).as_dtype().itemsize,
                    first_table=first_table,
                    end_table=len(self.tables),
                    first_slot=first_slot,
                    end_slot=slots,
                    owner_pooled=bucket.owner_pooled,
                )
            )

    @property
    def row_buckets(self) -> list[Bucket]:
        """The buckets whose rows travel, which come first."""
        return [bucket for bucket in self.buckets if not bucket.owner_pooled]

    @property
    def bag_buckets(self) -> list[Bucket]:
        """The buckets whose owners pool bags."""
        return [bucket for bucket in self.buckets if bucket.owner_pooled]

    def of(self, buckets: Sequence[Bucket]) -> list[TableShards]:
        """Returns the tables of some buckets."""
        return [t for b in buckets for t in self.tables[b.first_table : b.end_table]]


def slot_names(tables: Sequence[TableShards]) -> list[tuple[str, str]]:
    """Returns feature and table of each slot of the tables."""
    return [(feature, table.name) for table in tables for feature in table.features]


def _row_shards(bucket: BucketConfig) -> list[TableShards]:
    tables = []
    for i, table in enumerate(bucket.config.embedding_tables):
        sizes = [config.embedding_tables[i].local_rows for config in bucket.per_rank]
        tables.append(
            TableShards(
                name=table.name,
                rows=table.num_embeddings,
                features=tuple(table.feature_names),
                row_starts=tuple(accumulate(sizes, initial=0)),
            )
        )
    return tables


def _rows_before(bucket: BucketConfig, buckets: Sequence[BucketConfig]) -> list[int]:
    """Returns for each rank how many rows of the physical table come before those of a bucket."""
    before = [
        other for other in buckets if other.physical == bucket.physical and not other.owner_pooled
    ]
    return [
        sum(table.local_rows for other in before for table in other.per_rank[r].embedding_tables)
        for r in range(len(bucket.per_rank))
    ]


def _bag_shards(bucket: BucketConfig, rows_before: Sequence[int]) -> list[TableShards]:
    places: dict[str, list[tuple[int, int, int]]] = {}  # first column, rank, first row
    for rank, config in enumerate(bucket.per_rank):
        first_row = rows_before[rank]
        for shard in config.embedding_tables:
            assert shard.local_metadata is not None
            column = shard.local_metadata.shard_offsets[1]
            places.setdefault(shard.name, []).append((column, rank, first_row))
            first_row += shard.local_rows
    return [
        TableShards(
            name=table.name,
            rows=table.num_embeddings,
            features=tuple(table.feature_names),
            owners=tuple(rank for _, rank, _ in sorted(places[table.name])),
            first_rows=tuple(row for _, _, row in sorted(places[table.name])),
        )
        for table in bucket.config.embedding_tables
    ]


def _row_bytes(config: GroupedEmbeddingConfig, dim: int) -> int:
    optimizer = OPTIMIZERS[_optimizer(config)]
    weights = data_type_to_sparse_type(config.data_type).as_dtype().itemsize
    return dim * weights + optimizer.state_bytes(dim)


def _optimizer(config: GroupedEmbeddingConfig) -> Any:
    return (config.fused_params or {}).get("optimizer", EmbOptimType.EXACT_SGD)


def _output_type(config: GroupedEmbeddingConfig) -> SparseType:
    return (config.fused_params or {}).get("output_dtype", SparseType.FP32)


def _values(members: tuple[Any, ...]) -> list[str]:
    return [str(member.value) for member in members]


def kernels_of(device_type: str) -> list[str]:
    """Returns the compute kernels that fused tables can use on a device."""
    return _values(CUDA_KERNELS if device_type == "cuda" else CPU_KERNELS)


def check_bucket(bucket: BucketConfig, device: torch.device, types: Mapping[str, str]) -> None:
    """Refuses what the kernel cannot do, by table, with what it can.

    Args:
        bucket: the bucket.
        device: of its tables.
        types: how each table is sharded.
    """
    config = bucket.config
    kernels, optimizers = kernels_of(device.type), optimizers_of(device.type)
    optimizer, first = _optimizer(config), config.embedding_tables[0].name
    if not isinstance(optimizer, EmbOptimType):
        raise ValueError(
            f"table {first!r} ({types[first]} on {device.type}): optimizer is {optimizer!r}, must "
            f"be one of EmbOptimType's {_values(optimizers)}"
        )
    if device.type == "cpu" and (config.fused_params or {}).get("weight_decay"):
        logger.warning(
            "weight_decay is set for table %r, but FBGEMM's CPU kernels ignore it, as they do for "
            "stock tables",
            first,
        )
    for table in config.embedding_tables:
        where = f"table {table.name!r} ({types[table.name]} on {device.type})"
        if table.local_cols % 4 or table.local_cols <= 0:
            raise ValueError(
                f"{where}: embedding_dim is {table.local_cols}, must be a positive multiple of 4"
            )
        if table.compute_kernel.value not in kernels:
            raise ValueError(
                f"{where}: compute_kernel is {table.compute_kernel.value!r}, must be one of "
                f"{kernels}"
            )
        if optimizer not in optimizers:
            raise ValueError(
                f"{where}: optimizer is {optimizer.value!r}, must be one of {_values(optimizers)}"
            )
        if data_type_to_sparse_type(table.data_type) not in DATA_TYPES:
            raise ValueError(
                f"{where}: data_type is {table.data_type.value!r}, must be one of "
                f"{[t.name for t in DATA_TYPES]}"
            )
        if table.use_virtual_table:
            raise ValueError(f"{where}: use_virtual_table is True, must be False")
