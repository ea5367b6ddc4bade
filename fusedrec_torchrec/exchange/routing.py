"""Unique keys to owner ranks: who is asked for which local row, and where the answer will lie.

Unique keys come in ascending, that is in (table, rank) segments.  On the wire they go in the
order (owner, bucket, table), and the rows that come back are used as one matrix per bucket in
the order (owner, table).  Both are permutations of whole segments, so each key moves by an
offset that only depends on its segment.

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
        counts_WK: rows asked of each owner in each bucket.
        local_rows_U: row in the owner's bucket, int32.
        owner_U: the owner rank of each unique key.
        wire_U: position in the order of the wire.
        row_N: for each id, its row in the matrix of received rows of its bucket.
    """

    counts_WK: torch.Tensor
    local_rows_U: torch.Tensor
    owner_U: torch.Tensor
    wire_U: torch.Tensor
    row_N: torch.Tensor


def _starts(counts_G: torch.Tensor, order_G: torch.Tensor) -> torch.Tensor:
    """Start of each segment when segments are laid out in the given order."""
    ordered = counts_G[order_G]
    return torch.empty_like(counts_G).scatter_(0, order_G, ordered.cumsum(0) - ordered)


def route(layout: ExchangeLayout, unique: Unique) -> Route:
    """Routes unique keys to their owners; no host synchronisation."""
    keys_U = unique.keys_U
    num_tables, num_ranks, num_buckets = len(layout.tables), layout.world_size, len(layout.buckets)
    bounds_G1 = torch.searchsorted(keys_U, layout.segment_starts_G1)
    counts_G = bounds_G1.diff()
    segment_U = torch.bucketize(keys_U, layout.segment_starts_G1[1:-1], right=True)

    counts_KW = counts_G.new_zeros(num_buckets, num_ranks).index_add_(
        0, layout.bucket_of_table_T, counts_G.view(num_tables, num_ranks)
    )
    position_U = torch.arange(keys_U.numel(), device=keys_U.device)
    wire_shift_G = _starts(counts_G, layout.wire_order_G) - bounds_G1[:-1]
    wire_U = position_U + wire_shift_G[segment_U]
    if num_buckets == 1:
        row_U = wire_U
    else:
        counts_K = counts_KW.sum(1)
        bucket_start_K = counts_K.cumsum(0) - counts_K
        row_shift_G = (
            _starts(counts_G, layout.row_order_G)
            - bucket_start_K[layout.bucket_of_segment_G]
            - bounds_G1[:-1]
        )
        row_U = position_U + row_shift_G[segment_U]
    return Route(
        counts_WK=counts_KW.t(),
        local_rows_U=(keys_U + layout.row_shifts_G[segment_U]).int(),
        owner_U=layout.owner_of_segment_G[segment_U],
        wire_U=wire_U,
        row_N=row_U.int().index_select(0, unique.inverse_N),
    )
