"""Brings the pieces of a flat buffer from rank order into bucket order, and back.

Rows of several buckets travel in one buffer, owner (or requester) after owner, but are looked up
and pooled bucket after bucket.  The two orders hold the same pieces, one per (rank, bucket).
"""

import torch

__all__ = ["bucket_major", "rank_major"]


def bucket_major(flat: torch.Tensor, sizes: list[list[int]]) -> list[torch.Tensor]:
    """Splits a rank-major buffer into one tensor per bucket.

    Args:
        flat: pieces in the order (rank, bucket).
        sizes: [rank][bucket] number of elements of each piece.
    """
    buckets = len(sizes[0])
    if buckets == 1:
        return [flat]
    pieces = flat.split([size for row in sizes for size in row])
    return [torch.cat(pieces[k::buckets]) for k in range(buckets)]


def rank_major(per_bucket: list[torch.Tensor], sizes: list[list[int]]) -> torch.Tensor:
    """Undoes ``bucket_major``: one flat buffer, pieces in the order (rank, bucket)."""
    if len(per_bucket) == 1:
        return per_bucket[0]
    pieces = [flat.split([row[k] for row in sizes]) for k, flat in enumerate(per_bucket)]
    return torch.cat([piece for rank in zip(*pieces, strict=True) for piece in rank])
