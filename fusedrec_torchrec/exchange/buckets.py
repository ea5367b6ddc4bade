"""Buckets: which tables share one physical FBGEMM table, and what such a table can do.

A *bucket* holds the tables that share dimension, data type, optimizer with its settings, and
placement.  On every rank its rows are its tables' local shards one after another.
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
    "BucketedTables",
    "TableRanges",
    "check_bucket",
    "group_into_buckets",
    "kernels_of",
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


def group_into_buckets(
    tables_per_rank: Sequence[Sequence[ShardedEmbeddingTable]],
    max_rows: int = INT32_MAX,
    codecs: Mapping[str, object] | None = None,
    frozen: Collection[str] = (),
) -> list[list[GroupedEmbeddingConfig]]:
    """Groups the tables of each rank into buckets, one TorchRec group config per bucket.

    TorchRec's own ``group_tables`` keeps apart data types and optimizer settings.  It also
    keeps poolings apart, which pool at the requester here, and mixes dimensions and placements,
    which one physical table cannot: hence the neutral pooling and the partition before it.
    A bucket is split where its rows on some rank would not fit an int32 row number.  Tables whose
    ``codecs`` differ have buckets of their own, and so have ``frozen`` ones.
    """
    partitions: dict[tuple[object, ...], list[list[int]]] = {}  # table numbers, bucket by bucket
    rows_so_far: dict[tuple[object, ...], list[int]] = {}
    for t, table in enumerate(tables_per_rank[0]):
        kind = (
            *(table.local_cols, table.compute_kernel),
            *((codecs or {}).get(table.name), table.name in frozen),
        )
        local_rows = [tables[t].local_rows for tables in tables_per_rank]
        if max(local_rows) > max_rows:
            raise ValueError(
                f"table {table.name!r} has {max(local_rows)} rows on one rank, must be at most "
                f"{max_rows}: use more ranks or even row ranges"
            )
        so_far = rows_so_far.get(kind, [0] * len(local_rows))
        total = [a + b for a, b in zip(so_far, local_rows, strict=True)]
        parts = partitions.setdefault(kind, [[]])
        if max(total) > max_rows:
            parts.append([])
            total = local_rows
        parts[-1].append(t)
        rows_so_far[kind] = total

    buckets_per_rank: list[list[GroupedEmbeddingConfig]] = [[] for _ in tables_per_rank]
    for members in (members for parts in partitions.values() for members in parts):
        grouped = group_tables(
            [
                [dataclasses.replace(tables[t], pooling=PoolingType.SUM) for t in members]
                for tables in tables_per_rank
            ]
        )
        for buckets, configs in zip(buckets_per_rank, grouped, strict=True):
            buckets.extend(configs)
    return buckets_per_rank


@dataclass(frozen=True)
class Bucket:
    """One physical table.

    Attributes:
        dim: columns.
        row_bytes: memory of a row on its rank, weights and optimizer state together.
        wire_bytes: of a row that travels as it is looked up.
        first_table, end_table: its range of tables.
        first_slot, end_slot: its range of slots.
    """

    dim: int
    row_bytes: int
    wire_bytes: int
    first_table: int
    end_table: int
    first_slot: int
    end_slot: int


@dataclass(frozen=True)
class TableRanges:
    """A table as the exchange sees it: rank ``r`` owns ``[row_starts[r], row_starts[r + 1])``."""

    name: str
    rows: int
    features: tuple[str, ...]
    row_starts: tuple[int, ...]


class BucketedTables:
    """All fused tables of a module, bucket after bucket, with the rows that each rank owns.

    A *slot* is a pair of a feature and a table that it looks up.

    Args:
        buckets_per_rank: the buckets of each rank.
    """

    def __init__(self, buckets_per_rank: Sequence[Sequence[GroupedEmbeddingConfig]]) -> None:
        self.world_size = len(buckets_per_rank)
        self.buckets: list[Bucket] = []
        self.tables: list[TableRanges] = []
        slots = 0
        for k, bucket in enumerate(buckets_per_rank[0]):
            first_table, first_slot = len(self.tables), slots
            for i, table in enumerate(bucket.embedding_tables):
                shards = [rank[k].embedding_tables[i] for rank in buckets_per_rank]
                sizes = [shard.local_rows for shard in shards]
                self.tables.append(
                    TableRanges(
                        name=table.name,
                        rows=table.num_embeddings,
                        features=tuple(table.feature_names),
                        row_starts=tuple(accumulate(sizes, initial=0)),
                    )
                )
                slots += table.num_features()
            dim = bucket.embedding_tables[0].local_cols
            self.buckets.append(
                Bucket(
                    dim=dim,
                    row_bytes=_row_bytes(bucket, dim),
                    wire_bytes=dim * _output_type(bucket).as_dtype().itemsize,
                    first_table=first_table,
                    end_table=len(self.tables),
                    first_slot=first_slot,
                    end_slot=slots,
                )
            )

    @property
    def slot_names(self) -> list[tuple[str, str]]:
        """(feature, table) of each slot."""
        return [(feature, table.name) for table in self.tables for feature in table.features]


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


def check_bucket(config: GroupedEmbeddingConfig, device: torch.device) -> None:
    """Refuses what the kernel cannot do, by table, with what it can."""
    kernels, optimizers = kernels_of(device.type), optimizers_of(device.type)
    optimizer = _optimizer(config)
    if not isinstance(optimizer, EmbOptimType):
        raise ValueError(
            f"table {config.embedding_tables[0].name!r} (fused_row_wise on {device.type}): "
            f"optimizer is {optimizer!r}, must be one of EmbOptimType's {_values(optimizers)}"
        )
    if device.type == "cpu" and (config.fused_params or {}).get("weight_decay"):
        logger.warning(
            "weight_decay is set for table %r, but FBGEMM's CPU kernels ignore it, as they do for "
            "stock tables",
            config.embedding_tables[0].name,
        )
    for table in config.embedding_tables:
        where = f"table {table.name!r} (fused_row_wise on {device.type})"
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
