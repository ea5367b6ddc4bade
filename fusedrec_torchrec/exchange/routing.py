"""Unique keys to owner ranks: who is asked for which local row, and where the answer will lie.

Unique keys come part by part, in the order (bucket, owner).  The rows that come back are used in
the same order; on the wire they go in the order (owner, bucket).  That is a permutation of whole
parts, so each key moves by an offset that only depends on its part.

Shape suffixes as in ``layout``; N ids, U unique keys.
"""

from dataclasses import dataclass

import torch

from fusedrec_torchrec.exchange.dedup import Unique
from fusedrec_torchrec.exchange.layout import ExchangeLayout

__all__ = ["Route", "route"]


@dataclass(frozen=True)
class Route:
    """Where the unique keys of a batch go.

    Attributes:
        counts_KW: rows asked of each owner in each bucket.
        local_rows_U: row in the owner's bucket, int32.
    """

    counts_KW: torch.Tensor
    local_rows_U: torch.Tensor

    def positions(self, starts_KW: torch.Tensor, padding: int) -> torch.Tensor:
        """Where each unique key goes if the keys of a part go to consecutive places.

        Args:
            starts_KW: place of the first key of each part.
            padding: place of everything behind the last unique key.
        """
        counts_P = self.counts_KW.reshape(-1)
        shifts_P = starts_KW.reshape(-1) - (counts_P.cumsum(0) - counts_P)
        keys = self.local_rows_U.numel()
        position_U = torch.arange(keys, device=counts_P.device)
        return position_U.add_(_per_key(shifts_P, counts_P, keys, padding)).clamp_(max=padding)

    def wire_order(self) -> torch.Tensor:
        """The local rows, owner after owner."""
        if self.counts_KW.size(0) == 1:
            return self.local_rows_U
        counts_WK = self.counts_KW.t().reshape(-1)
        starts_WK = (counts_WK.cumsum(0) - counts_WK).view(self.counts_KW.t().shape)
        keys = self.local_rows_U.numel()
        ordered = self.local_rows_U.new_empty(keys + 1)
        ordered.scatter_(0, self.positions(starts_WK.t(), keys), self.local_rows_U)
        return ordered[:-1]


def _per_key(values_P: torch.Tensor, counts_P: torch.Tensor, keys: int, last: int) -> torch.Tensor:
    """The value of each key's part; ``last`` behind the last unique key."""
    values = torch.cat([values_P, values_P.new_full((1,), last)])
    counts = torch.cat([counts_P, (keys - counts_P.sum()).view(1)])
    return values.repeat_interleave(counts, output_size=keys)


def route(layout: ExchangeLayout, unique: Unique) -> Route:
    """Routes unique keys to their owners; no host synchronisation."""
    keys_U = unique.keys_U
    starts_U = _per_key(layout.part_starts_P1[:-1], unique.counts_P, keys_U.numel(), 0)
    return Route(
        counts_KW=unique.counts_P.view(len(layout.buckets), layout.world_size),
        local_rows_U=(keys_U - starts_U).int(),
    )
