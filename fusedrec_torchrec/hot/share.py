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
    slots: Sequence[torch.Tensor],
) -> None:
    """Loads slots of the replicas; a collective call.

    Args:
        pg: the process group.
        homes: of each bucket.
        replicas: of each bucket.
        slots: of each bucket, the slots to load; the same on all ranks.
    """
    widths = [sum(_words(tensor[:0]).size(1) for tensor in r.tensors) for r in replicas]
    sizes = [chosen.numel() * width for chosen, width in zip(slots, widths, strict=True)]
    if not sum(sizes):
        return
    buffer = torch.zeros(sum(sizes), dtype=torch.int32, device=slots[0].device)
    blocks = [flat.view(-1, width) for flat, width in zip(buffer.split(sizes), widths, strict=True)]
    for home, replica, chosen, block in zip(homes, replicas, slots, blocks, strict=True):
        place = chosen.new_full((replica.capacity,), -1)
        place[chosen] = torch.arange(chosen.numel(), device=chosen.device)
        place = place[home.slots]
        here = (place >= 0).nonzero().flatten()
        rows = torch.cat([_words(tensor) for tensor in home.read()], dim=1)
        block[place[here]] = rows[here]
    if pg.size() > 1:
        with waiting(pg, "hot set"):
            dist.all_reduce(buffer, group=pg)
    for replica, chosen, block in zip(replicas, slots, blocks, strict=True):
        columns = block.split([_words(tensor[:0]).size(1) for tensor in replica.tensors], dim=1)
        for tensor, words in zip(replica.tensors, columns, strict=True):
            tensor.index_copy_(0, chosen, words.contiguous().view(tensor.dtype))


def _words(tensor: torch.Tensor) -> torch.Tensor:
    """Rows as int32; a row of 16-bit numbers has an even number of them."""
    return tensor.contiguous().view(torch.int32)
