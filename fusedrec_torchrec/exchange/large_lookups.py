"""Lookups of very many ids on CPU: some tables of a bucket at a time.

FBGEMM sorts all ids of a call before it updates rows.  As soon as they do not fit in the caches,
that takes longer than all the rest: measured with bags of 100 ids, 2.7 million of 13 tables, lookup
and update take 70 ms in one call and 51 ms in 13.  With less than a million, one call is faster.

Shape suffixes: W requesters, T tables of the bucket on this rank, U bags, R ids.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from fusedrec_torchrec.exchange.asked import Asked

__all__ = ["SMALLEST", "PartedLookup"]

SMALLEST = 1 << 20  # ids that are looked up in parts
PART = 1 << 18  # ids of a part, at least, if there are more


@dataclass(frozen=True)
class PartedLookup:
    """What requesters ask of a bucket, cut between tables.

    Attributes:
        parts: what is asked of some of the tables, requester after requester.
        units: [part][requester] how many bags that are.
    """

    parts: list[Asked]
    units: list[list[int]]

    @classmethod
    def cut(
        cls, asked: Asked, units_of_rank: Sequence[int], table_starts_T: torch.Tensor
    ) -> "PartedLookup | None":
        """Cuts it; None if that does not pay, or if bags do not come table after table.

        Args:
            asked: bags of the bucket's tables, none of them empty, requester after requester.
            units_of_rank: how many bags each requester asks for.
            table_starts_T: the first local row of each table.
        """
        if asked.offsets_U1 is None or asked.rows_R.numel() < SMALLEST:
            return None
        ranks, tables = len(units_of_rank), table_starts_T.numel()
        offsets_U1 = asked.offsets_U1.long()
        first_U = asked.rows_R.index_select(0, offsets_U1[:-1])
        table_U = torch.bucketize(first_U, table_starts_T, right=True) - 1
        requester_U = torch.arange(ranks).repeat_interleave(torch.tensor(units_of_rank))
        place_U = requester_U * tables + table_U
        if bool((place_U.diff() < 0).any()):
            return None
        units_WT = torch.bincount(place_U, minlength=ranks * tables).view(ranks, tables)
        ends_WT = units_WT.flatten().cumsum(0)
        id_ends_WT = offsets_U1[ends_WT].view(ranks, tables)
        ids_T = id_ends_WT.flatten().diff(prepend=ends_WT.new_zeros(1)).view(ranks, -1).sum(0)
        groups = _groups(ids_T.tolist())
        if len(groups) < 2:
            return None
        sizes = [int(units_WT[w, a:b].sum()) for w in range(ranks) for a, b in groups]
        id_sizes = [int(n) for n in _ids(id_ends_WT, groups)]
        lengths = offsets_U1.diff().split(sizes)
        rows = asked.rows_R.split(id_sizes)
        weights = None if asked.weights_R is None else asked.weights_R.split(id_sizes)
        parts = []
        for part in range(len(groups)):
            own = slice(part, None, len(groups))
            offsets = torch.ops.fbgemm.asynchronous_complete_cumsum(torch.cat(lengths[own]))
            parts.append(
                Asked(
                    torch.cat(rows[own]),
                    offsets.to(asked.offsets_U1.dtype),
                    None if weights is None else torch.cat(weights[own]),
                )
            )
        return cls(parts, [sizes[part :: len(groups)] for part in range(len(groups))])

    def joined(self, pooled: Sequence[torch.Tensor]) -> torch.Tensor:
        """Returns the bags of all parts, requester after requester.

        Args:
            pooled: the bags of each part.
        """
        pieces = [bags.split(units) for bags, units in zip(pooled, self.units, strict=True)]
        return torch.cat([piece for of_rank in zip(*pieces, strict=True) for piece in of_rank])


def _groups(ids_T: Sequence[int]) -> list[tuple[int, int]]:
    """Returns ranges of consecutive tables that have enough ids for a part."""
    ends, ids = [], 0
    for table, number in enumerate(ids_T, start=1):
        ids += number
        if ids >= PART:
            ends.append(table)
            ids = 0
    ends = [*ends[:-1], len(ids_T)]  # what is left goes to the last
    return list(zip([0, *ends[:-1]], ends, strict=True))


def _ids(id_ends_WT: torch.Tensor, groups: Sequence[tuple[int, int]]) -> list[int]:
    """Returns how many ids each requester sent for each group, requester after requester."""
    ends: list[int] = id_ends_WT[:, [end - 1 for _, end in groups]].flatten().tolist()
    return [end - start for start, end in zip([0, *ends[:-1]], ends, strict=True)]
