"""Rows from their homes to the replicas of all ranks, bit for bit, in one all-reduce.

Every rank puts the rows that live with it into a buffer of zeros, as integers; their sum is the
rows themselves.
"""

from collections.abc import Sequence

import torch
import torch.distributed as dist

from fusedrec_torchrec.core.lost_rank import waiting
from fusedrec_torchrec.hot.home import Home
from fusedrec_torchrec.replicas.replica import Replica

__all__ = ["share"]


def share(
    pg: dist.ProcessGroup,
    homes: Sequence[Home],
    replicas: Sequence[Replica],
    places: Sequence[torch.Tensor],
) -> None:
    """Loads places of the replicas; a collective call.

    Args:
        pg: the process group.
        homes: of each bucket.
        replicas: of each bucket.
        places: of each bucket, the places to load; the same on all ranks.
    """
    widths = [sum(_words(tensor[:0]).size(1) for tensor in r.tensors) for r in replicas]
    sizes = [chosen.numel() * width for chosen, width in zip(places, widths, strict=True)]
    if not sum(sizes):
        return
    buffer = torch.zeros(sum(sizes), dtype=torch.int32, device=places[0].device)
    blocks = [flat.view(-1, width) for flat, width in zip(buffer.split(sizes), widths, strict=True)]
    for home, replica, chosen, block in zip(homes, replicas, places, blocks, strict=True):
        at_chosen = chosen.new_full((replica.capacity,), -1)
        at_chosen[chosen] = torch.arange(chosen.numel(), device=chosen.device)
        at_chosen = at_chosen[home.places]
        here = (at_chosen >= 0).nonzero().flatten()
        rows = torch.cat([_words(tensor) for tensor in home.read()], dim=1)
        block[at_chosen[here]] = rows[here]
    if pg.size() > 1:
        with waiting(pg, "hot set"):
            dist.all_reduce(buffer, group=pg)
    for replica, chosen, block in zip(replicas, places, blocks, strict=True):
        columns = block.split([_words(tensor[:0]).size(1) for tensor in replica.tensors], dim=1)
        for tensor, words in zip(replica.tensors, columns, strict=True):
            tensor.index_copy_(0, chosen, words.contiguous().view(tensor.dtype))


def _words(tensor: torch.Tensor) -> torch.Tensor:
    """Views rows as int32; a row of 16-bit numbers has an even number of them."""
    return tensor.contiguous().view(torch.int32)
