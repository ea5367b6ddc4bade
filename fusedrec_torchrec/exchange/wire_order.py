"""The order in which looked up units travel: requester after requester, bucket after bucket."""

from collections.abc import Sequence

import torch

__all__ = ["in_wire_order"]


def in_wire_order(
    looked_up: Sequence[torch.Tensor],
    buckets: Sequence[Sequence[int]],
    counts: Sequence[Sequence[int]],
    dims: Sequence[int],
) -> torch.Tensor:
    """Returns all units in the order (requester, bucket), flat.

    Args:
        looked_up: of each call, in the order (requester, bucket of the call).
        buckets: of each call, ascending.
        counts: [requester][bucket] units.
        dims: columns of each bucket.
    """
    if len(looked_up) == 1:
        return looked_up[0].view(-1)
    pieces: dict[tuple[int, int], torch.Tensor] = {}
    for own_buckets, units in zip(buckets, looked_up, strict=True):
        places = [(r, k) for r in range(len(counts)) for k in own_buckets]
        parts = units.reshape(-1).split([counts[r][k] * dims[k] for r, k in places])
        pieces.update(zip(places, parts, strict=True))
    return torch.cat([pieces[place] for place in sorted(pieces)])
