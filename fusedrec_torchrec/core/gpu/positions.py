"""Weights of ids by their positions in their bags, and gradients of these weights, on CUDA.

All slots are one launch in each direction.  A slot is told by its first bag, its number of bags,
where its weights begin among those of all slots, and how many it has.

Shape suffixes: S slots, B bags, N ids, P weights of all slots.
"""

import torch
import triton
import triton.language as tl

from fusedrec_torchrec.core.gpu.kernel import kernel

__all__ = ["position_sums", "position_weights"]

BAGS = 64  # of a program
IDS = 8  # of a bag at a time


@triton.jit
def _bags_of(slots, offsets, n, BLOCK: tl.constexpr):
    """Returns where the bags of a program begin, and their lengths; their weights' first place."""
    slot = slots + 4 * tl.program_id(1)
    sample = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    live = sample < tl.load(slot + 1)
    bag = tl.load(slot) + sample
    begin = tl.load(offsets + bag, mask=live, other=0).to(tl.int64)
    begin = tl.minimum(tl.maximum(begin, 0), n)
    end = tl.minimum(tl.load(offsets + bag + 1, mask=live, other=0).to(tl.int64), n)
    length = tl.minimum(tl.maximum(end - begin, 0), tl.load(slot + 3))
    return begin, length, tl.load(slot + 2)


@kernel(numbers="n", addresses="offsets weights")
def _position_weights(weights, slots, offsets, out, n, IDS: tl.constexpr, BLOCK: tl.constexpr):
    begin, length, first = _bags_of(slots, offsets, n, BLOCK)
    for tile in range(0, tl.max(length, 0), IDS):
        i = tile + tl.arange(0, IDS)
        is_id = i[None, :] < length[:, None]
        weight = tl.load(weights + first + i[None, :] + begin[:, None] * 0, mask=is_id, other=0.0)
        tl.store(out + begin[:, None] + i[None, :], weight, mask=is_id)


@kernel(numbers="n", addresses="offsets gradient")
def _position_sums(gradient, slots, offsets, out, n, IDS: tl.constexpr, BLOCK: tl.constexpr):
    """Adds up the gradients of some bags by position, and adds them to those of others."""
    begin, length, first = _bags_of(slots, offsets, n, BLOCK)
    longest = tl.max(length, 0)
    for tile in range(0, longest, IDS):
        i = tile + tl.arange(0, IDS)
        is_id = i[None, :] < length[:, None]
        own = tl.load(gradient + begin[:, None] + i[None, :], mask=is_id, other=0.0)
        total = tl.sum(own.to(tl.float32), 0)
        tl.atomic_add(out + first + i, total, mask=i < longest, sem="relaxed")


def position_weights(
    weights_P: torch.Tensor, slots_S4: torch.Tensor, offsets_B1: torch.Tensor, batch: int, ids: int
) -> torch.Tensor:
    """Returns the weight of each id; of ids that are in no bag, or too far behind, whatever.

    Args:
        weights_P: of the positions in bags, slot after slot.
        slots_S4: what tells the slots.
        offsets_B1: where bags begin.
        batch: the most bags that a slot has.
        ids: how many there are.
    """
    out_N = torch.empty(ids, dtype=weights_P.dtype, device=weights_P.device)
    if ids and batch:
        _position_weights[(triton.cdiv(batch, BAGS), slots_S4.size(0))](
            weights_P, slots_S4, offsets_B1, out_N, ids, IDS=IDS, BLOCK=BAGS
        )
    return out_N


def position_sums(
    gradient_N: torch.Tensor,
    slots_S4: torch.Tensor,
    offsets_B1: torch.Tensor,
    batch: int,
    out_P: torch.Tensor,
) -> None:
    """Adds up the gradients of ids by position, slot after slot.

    Args:
        gradient_N: of what ``position_weights`` has returned.
        out_P: the sums, float32; zeros at first.

    The others are those of ``position_weights``.
    """
    if gradient_N.numel() and batch:
        _position_sums[(triton.cdiv(batch, BAGS), slots_S4.size(0))](
            gradient_N, slots_S4, offsets_B1, out_P, gradient_N.numel(), IDS=IDS, BLOCK=BAGS
        )
