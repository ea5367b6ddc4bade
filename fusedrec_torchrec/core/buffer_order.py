"""Brings the pieces of a flat buffer from rank order into bucket order, and back.

Rows of several buckets travel in one buffer, owner (or requester) after owner, but are looked up
and pooled bucket after bucket.  The two orders hold the same pieces, one per (rank, bucket).
"""

from collections.abc import Sequence

import torch

__all__ = ["as_one", "bucket_major", "rank_major"]


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


def as_one(pieces: Sequence[torch.Tensor]) -> torch.Tensor:
    """Returns flat pieces as one tensor; it is no copy if they lie one behind another in memory."""
    first = pieces[0]
    storage, end = first.untyped_storage().data_ptr(), first.storage_offset()
    for piece in pieces:
        if piece.numel():
            behind = piece.untyped_storage().data_ptr() == storage and piece.storage_offset() == end
            if not (behind and piece.is_contiguous()):
                return torch.cat(list(pieces))
        end += piece.numel()
    return first.as_strided((end - first.storage_offset(),), (1,))
