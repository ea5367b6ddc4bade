"""The fused key space: where each row of each table lives.

In: the tables of a module in their buckets.  Out: an ``ExchangeLayout``, the index arithmetic of
tables whose rows travel; ``bag_layout`` is that of tables whose owners pool bags.

The *fused key space* numbers all rows of these tables; that is FusedRec's category-aware key,
exact because TorchRec's tables have fixed sizes.  A *segment* is the range of one table that one
rank owns; keys run through the segments in the order (bucket, owner, table).  So the keys of one
bucket and owner, a *part*, are contiguous, and the row in the owner's physical table is the key
minus the start of the part.

With replicated rows every bucket has one more part: its replica, which every rank holds.  It
follows the owners as if it were one more of them, and a row in it is the key minus the start of the
part, too.

Shape suffixes: T tables, W ranks, O owners (the ranks and, with replicated rows, the replica),
K buckets, P = K * O parts, S slots ((feature, table) pairs).
"""

from collections.abc import Sequence
from itertools import pairwise

import torch

from fusedrec_torchrec.exchange.buckets import BucketedTables, slot_names

__all__ = ["ExchangeLayout"]

INT32_MAX = torch.iinfo(torch.int32).max


class ExchangeLayout:
    """The index arithmetic of rows that travel, on the device of the ids.

    Args:
        tables: the fused tables of a module; those that requesters pool count.
        device: of the ids.
        replica_capacity: replicated rows that each bucket has room for on every rank; None if no
            rows are replicated.
    """

    def __init__(
        self,
        tables: BucketedTables,
        device: torch.device,
        replica_capacity: Sequence[int] | None = None,
    ) -> None:
        self.buckets = tables.row_buckets
        self.tables = tables.of(self.buckets)
        self.slot_names = slot_names(self.tables)
        self.world_size = tables.world_size
        self.owners = self.world_size + (replica_capacity is not None)
        self.replica_capacity = replica_capacity
        self.device = device
        self._build_tensors()

    def keys_of(self, table: int, ids: torch.Tensor) -> torch.Tensor:
        """Returns keys of rows of one table, int64, on the device of the ids."""
        starts = torch.tensor(self.tables[table].row_starts[1:-1], device=ids.device)
        owner = torch.searchsorted(starts, ids, right=True)
        return ids + torch.tensor(self._shifts[table], device=ids.device)[owner]

    def rows_of(self, keys: torch.Tensor) -> dict[str, torch.Tensor]:
        """Returns the ids of the rows with these keys by table, in order, on the host."""
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
            if self.replica_capacity is not None:
                part_starts.append(key)
                key += self.replica_capacity[k]
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
