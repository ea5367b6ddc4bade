"""Counts what a batch asks for, from the batch and the plan alone.

The exchange's own arithmetic is not used, so that what it sends can be compared with these counts.

What travels for a table is *units* of as many columns as a shard has: a row that the requester
pools, or a bag that its owner has pooled.  They are counted in elements, units x columns, since
tables and shards have different numbers of columns.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch.distributed as dist
from numpy.typing import NDArray
from torchrec.distributed.types import ParameterSharding
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from fusedrec_torchrec.bench.workload import Workload
from fusedrec_torchrec.sharding.sharding_type import FUSED, OWNER_POOLED

__all__ = ["TableRequests", "requests_of"]


@dataclass(frozen=True)
class TableRequests:
    """What a batch asks of one table.

    Attributes:
        ids: of all bags.
        bags: number of bags, empty ones included; None if sequences are asked for.
        distinct_rows: the ids, each once, sorted.
        distinct_bags: number of different bags, order included, without the empty one.
    """

    ids: NDArray[np.int64]
    bags: int | None
    distinct_rows: NDArray[np.int64]
    distinct_bags: int

    @classmethod
    def count(cls, batch: KeyedJaggedTensor, table: str, sequence: bool) -> "TableRequests":
        """Counts the requests of one table's feature."""
        feature = batch[table]
        ids = feature.values().numpy()
        ends = np.cumsum(feature.lengths().numpy())
        # As bytes, bags are equal if and only if they hold the same ids in the same order.
        bags = {bag.tobytes() for bag in np.split(ids, ends[:-1]) if len(bag)}
        return cls(ids, None if sequence else len(ends), np.unique(ids), len(bags))

    @property
    def least(self) -> int:
        """The least units that can serve the batch: distinct rows, or distinct bags if fewer."""
        rows = len(self.distinct_rows)
        return rows if self.bags is None else min(rows, self.distinct_bags)

    def units(self, sharding_type: str, first_row: int, rows: int, dedup: bool = False) -> int:
        """Returns how many units the owner of a shard is asked for.

        Fused tables send distinct rows or distinct bags; TorchRec's send a row for each bag, or
        for each id of a sequence, or for each distinct one with their own dedup.
        """
        ends = (first_row, first_row + rows)
        if sharding_type == FUSED or (dedup and self.bags is None):
            return int(np.diff(np.searchsorted(self.distinct_rows, ends))[0])
        if sharding_type in OWNER_POOLED:
            return self.distinct_bags
        if self.bags is None:
            return int(((self.ids >= ends[0]) & (self.ids < ends[1])).sum())
        return self.bags if rows else 0


def requests_of(
    workload: Workload, plan: Mapping[str, ParameterSharding], dedup: bool = False
) -> dict[str, int]:
    """Returns what this rank's first batch asks for.

    Args:
        workload: the batches.
        plan: how the tables are sharded.
        dedup: whether stock shardings of sequences make ids unique.

    Returns:
        ``ids``; ``outputs``, the rows of output they make; ``unique``, the distinct rows among
        them; ``distinct_bags``; ``least_elements``, of distinct rows or distinct bags, whichever
        are fewer, table by table; ``own_elements``, of the units that this rank owns itself;
        ``unique_remote_bytes``, the size of those that another rank owns, in fp32.
    """
    rank, batch = dist.get_rank(), workload.batches[0]
    sequence = workload.config.module == "ec"
    result = {"unique": 0, "distinct_bags": 0, "least_elements": 0, "own_elements": 0}
    remote = 0
    for name, dim in zip(workload.table_rows, workload.dims, strict=True):
        asked = TableRequests.count(batch, name, sequence)
        result["unique"] += len(asked.distinct_rows)
        result["distinct_bags"] += asked.distinct_bags
        result["least_elements"] += asked.least * dim
        for shard in _shards(plan[name]):
            (first_row, _), (rows, columns) = shard.shard_offsets, shard.shard_sizes
            elements = columns * asked.units(plan[name].sharding_type, first_row, rows, dedup)
            if shard.placement.rank() == rank:
                result["own_elements"] += elements
            else:
                remote += elements
    ids = batch.values().numel()
    return {
        "ids": ids,
        "outputs": ids if sequence else batch.lengths().numel(),
        **result,
        "unique_remote_bytes": 4 * remote,
    }


def _shards(sharding: ParameterSharding) -> list[Any]:
    """Returns the shards of a table; none if every rank has all of it."""
    spec: Any = sharding.sharding_spec
    return [] if spec is None else list(spec.shards)
