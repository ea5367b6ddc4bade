"""Where the tables live whose owners pool bags.

Such a table lies whole on one rank, or its columns lie on several.  What an owner is asked for is a
*unit*: a distinct bag and a shard of its table, answered by one row.  A *cell* is the place of a
unit in the output: as many columns as the shard has.

Shape suffixes: S slots, X shards of the slots' tables, slot after slot.
"""

from itertools import accumulate

import torch

from fusedrec_torchrec.exchange.buckets import Bucket, BucketedTables, slot_names

__all__ = ["BagLayout"]


class BagLayout:
    """The index arithmetic of bags that their owners pool.

    Args:
        tables: the fused tables of a module; those that owners pool count.
        device: of the ids.

    Attributes:
        buckets: those of these tables.
        first_slot: the first slot of them; the slots of other tables come before.
        table_numbers: which table each slot looks up.
        rows: of each slot's table.
        shards: how many ranks have columns of each slot's table.
        ends_S: where the shards of each slot end in ``shards_3X``.
        shards_3X: bucket, owner and first row in the owner's bucket of each shard.
        parts: bucket * ranks + owner of each shard, on the host.
    """

    def __init__(self, tables: BucketedTables, device: torch.device) -> None:
        self.buckets = tables.bag_buckets
        self.tables = tables.of(self.buckets)
        self.slot_names = slot_names(self.tables)
        self.world_size = tables.world_size
        self.device = device
        self.first_slot = self.buckets[0].first_slot if self.buckets else 0
        bucket_of = [k for k, b in enumerate(self.buckets) for _ in self._tables_of(b)]
        slots = [
            (t, bucket_of[t], table) for t, table in enumerate(self.tables) for _ in table.features
        ]
        self.table_numbers = [t for t, _, _ in slots]
        self.rows = [table.rows for _, _, table in slots]
        self.shards = [len(table.owners) for _, _, table in slots]
        self.ends_S = torch.tensor(list(accumulate(self.shards)), dtype=torch.int64, device=device)
        places = [
            (bucket, owner, row)
            for _, bucket, table in slots
            for owner, row in zip(table.owners, table.first_rows, strict=True)
        ]
        self.parts = [bucket * self.world_size + owner for bucket, owner, _ in places]
        self.shards_3X = torch.tensor(places, dtype=torch.int64, device=device).view(-1, 3).t()
        self.shards_3X = self.shards_3X.contiguous()

    def _tables_of(self, bucket: Bucket) -> range:
        return range(bucket.first_table, bucket.end_table)

    def slots_of(self, bucket: Bucket) -> slice:
        """Returns the slots of a bucket, among those of these tables."""
        return slice(bucket.first_slot - self.first_slot, bucket.end_slot - self.first_slot)
