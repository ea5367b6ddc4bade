"""Yes or no for each unit of several ranks, as bits that travel in bytes.

Every rank's bits begin with a byte of their own, so that sizes follow from the numbers of units,
which both sides know.
"""

from collections.abc import Sequence

import numpy as np
import torch

__all__ = ["pack", "sizes_of", "unpack"]

BITS = 8


def sizes_of(counts: Sequence[int]) -> list[int]:
    """Returns the bytes for each rank, from the number of its units."""
    return [-(-count // BITS) for count in counts]


def pack(mask_U: torch.Tensor, counts: Sequence[int]) -> torch.Tensor:
    """Returns the bytes for all ranks, uint8.

    Args:
        mask_U: a bool for each unit, rank after rank, on the CPU.
        counts: how many units each rank has.
    """
    packed = [np.packbits(piece.numpy()) for piece in mask_U.split(list(counts))]
    return torch.from_numpy(np.concatenate(packed))


def unpack(packed: torch.Tensor, counts: Sequence[int]) -> torch.Tensor:
    """Returns a bool for each unit, rank after rank, from what ``pack`` has made."""
    pieces = packed.split(sizes_of(counts))
    masks = [
        np.unpackbits(piece.numpy(), count=count)
        for piece, count in zip(pieces, counts, strict=True)
    ]
    return torch.from_numpy(np.concatenate(masks)).bool()
