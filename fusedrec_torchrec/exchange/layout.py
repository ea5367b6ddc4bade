"""Buckets and the fused key space: where each row of each table lives.

In: the sharded tables of a module, as TorchRec groups them.  Out: the buckets (one physical
FBGEMM table each) and an ``ExchangeLayout``, the index arithmetic of the data path.

A *bucket* holds the tables that share dimension, data type, optimizer with its settings, and
placement.  On every rank its rows are its tables' local shards one after another.

The *fused key space* numbers all rows of all fused tables; that is FusedRec's category-aware key,
exact because TorchRec's tables have fixed sizes.  A *segment* is the range of one table that one
rank owns; keys run through the segments in the order (bucket, owner, table).  So the keys of one
bucket and owner, a *part*, are contiguous, and the row in the owner's physical table is the key
minus the start of the part.

With hot rows every bucket has one more part: its replica, which every rank holds.  It follows the
owners as if it were one more of them, and a row in it is the key minus the start of the part, too.

Shape suffixes: T tables, W ranks, O owners (the ranks and, with hot rows, the replica), K buckets,
P = K * O parts, S slots ((feature, table) pairs).
"""

import dataclasses
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import torch
from torchrec.distributed.embedding_sharding import group_tables
from torchrec.distributed.embedding_types import GroupedEmbeddingConfig, ShardedEmbeddingTable
from torchrec.modules.embedding_configs import PoolingType

__all__ = ["Bucket", "ExchangeLayout", "group_into_buckets"]

INT32_MAX = torch.iinfo(torch.int32).max


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
    """One physical table: its dimension and its ranges of tables and of slots."""

    dim: int
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


class ExchangeLayout:
    """The index arithmetic of the data path, on the device of the ids.

    Args:
        buckets_per_rank: the buckets of each rank.
        device: of the ids.
        hot_capacity: hot rows that each bucket has room for; None without hot rows.
    """

    def __init__(
        self,
        buckets_per_rank: Sequence[Sequence[GroupedEmbeddingConfig]],
        device: torch.device,
        hot_capacity: Sequence[int] | None = None,
    ) -> None:
        self.world_size = len(buckets_per_rank)
        self.owners = self.world_size + (hot_capacity is not None)
        self.hot_capacity = hot_capacity
        self.device = device
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
            self.buckets.append(
                Bucket(
                    dim=bucket.embedding_tables[0].local_cols,
                    first_table=first_table,
                    end_table=len(self.tables),
                    first_slot=first_slot,
                    end_slot=slots,
                )
            )
        self._build_tensors()

    @property
    def slot_names(self) -> list[tuple[str, str]]:
        """(feature, table) of each slot."""
        return [(feature, table.name) for table in self.tables for feature in table.features]

    def keys_of(self, table: int, ids: torch.Tensor) -> torch.Tensor:
        """Keys of rows of one table, int64, on the device of the ids."""
        starts = torch.tensor(self.tables[table].row_starts[1:-1], device=ids.device)
        owner = torch.searchsorted(starts, ids, right=True)
        return ids + torch.tensor(self._shifts[table], device=ids.device)[owner]

    def rows_of(self, keys: torch.Tensor) -> dict[str, torch.Tensor]:
        """Ids of the rows with these keys by table, in order; on the host."""
        keys = keys.cpu().long()
        segments = sorted(
            (begin + self._shifts[t][r], end - begin, t, r)
            for t, table in enumerate(self.tables)
            for r, (begin, end) in enumerate(pairwise(table.row_starts))
            if end > begin
        )
        starts = torch.tensor([segment[0] for segment in segments])
        at = torch.searchsorted(starts, keys, right=True) - 1
        tables = torch.tensor([t for _, _, t, _ in segments])[at]
        ids = keys - torch.tensor([self._shifts[t][r] for _, _, t, r in segments])[at]
        return {
            self.tables[t].name: ids[tables == t].sort().values for t in tables.unique().tolist()
        }

    def _build_tensors(self) -> None:
        ranks = self.world_size
        shifts: list[list[int]] = [[0] * ranks for _ in self.tables]  # key = id + shift
        part_starts, key = [], 0
        for k, bucket in enumerate(self.buckets):
            for r in range(ranks):
                part_starts.append(key)
                for t in range(bucket.first_table, bucket.end_table):
                    start, end = self.tables[t].row_starts[r : r + 2]
                    shifts[t][r] = key - start
                    key += end - start
            if self.hot_capacity is not None:
                part_starts.append(key)
                key += self.hot_capacity[k]
        self.key_space = key
        self._shifts = shifts
        # The size itself is the padding of static-shape dedup and must fit, too.
        self.key_dtype = torch.int32 if key < INT32_MAX else torch.int64
        self.part_starts_P1 = torch.tensor(
            [*part_starts, key], dtype=self.key_dtype, device=self.device
        )
        slot_tables = [t for t, table in enumerate(self.tables) for _ in table.features]

        def of_slots(values: Sequence[object]) -> torch.Tensor:
            return torch.tensor(
                [values[t] for t in slot_tables], dtype=torch.int64, device=self.device
            )

        self.slot_rows_S = of_slots([table.rows for table in self.tables])
        self.slot_starts_SW = of_slots([table.row_starts[:-1] for table in self.tables])
        self.slot_shifts_SW = of_slots(shifts)
        # TorchRec's even split: rank r owns rows [r * block, (r + 1) * block).
        blocks = [max(-(-table.rows // ranks), 1) for table in self.tables]
        even = all(
            table.row_starts[r] == min(r * block, table.rows)
            for table, block in zip(self.tables, blocks, strict=True)
            for r in range(ranks)
        )
        self.slot_blocks_S = of_slots(blocks) if even else None
