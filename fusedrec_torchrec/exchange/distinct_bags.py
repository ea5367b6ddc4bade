"""Bags that hold the same ids are sent and pooled once (RecD, MLSys 2023).

Two bags are the same if they are of one table and hold the same ids, in the same order and with the
same weights: then their sums are the same to the last bit.  Hashes find candidates, and ids are
compared in full.

To look for equal bags costs a pass over the ids.  A slot does so if enough bags of a sample repeat,
which is a sixteenth of its bags, but at least 128 or half of them, and all of 32 or fewer: runs of
four, spread over the slot at irregular places.  So it finds bags that repeat at once, as in a
session, or at a distance, or in one part of the batch only.

Nothing is remembered from batch to batch: sums of gradients, whose last bits depend on which bags
are one, are the same in a run that was interrupted and resumed.

Shape suffixes: S slots, B bags, N ids, G distinct bags with ids, M ids in them.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from fusedrec_torchrec.core import native
from fusedrec_torchrec.core.transfer import to_device

__all__ = ["BagDedup", "DistinctBags"]

# One of so many bags is in the sample; at least so many, or half of them; in runs of so many.
PART, LEAST, RUN = 16, 128, 4
ALL = 32  # so many bags are a sample by themselves
# Where runs lie, by numbers of MurmurHash3 and a seed by which halves, thirds and quarters of
# common sizes are found to be equal.
_MIX_RUN = (185, 0x85EBCA6B, 0xC2B2AE35)
# Constants of SplitMix64 and others, as signed numbers; products wrap around.
_MIX = (-7046029254386353131, -4658895280553007687, -7723592293110705685, -2643881736870682267)


@dataclass(frozen=True)
class DistinctBags:
    """The bags of some slots, each once.

    Attributes:
        number_B: for each bag which of the distinct ones it is, -1 if it is empty; int32.
        lengths_G: ids of each distinct bag, int32.
        ids_M: these ids.
        weights_M: their weights; None if there are none.
        bags_S: how many distinct bags are first seen in each slot; they come slot after slot.
        ids_S: how many ids these have.
        full: how many bags are not empty.
    """

    number_B: torch.Tensor
    lengths_G: torch.Tensor
    ids_M: torch.Tensor
    weights_M: torch.Tensor | None
    bags_S: list[int]
    ids_S: list[int]
    full: int


class BagDedup:
    """Finds the distinct bags of batches.

    Args:
        tables: a number for the table of each slot; equal bags of one table are the same.
        worth: the share of bags that must seem to repeat for a slot to look for equal ones.
        device: of the ids.
    """

    def __init__(self, tables: Sequence[int], worth: float, device: torch.device) -> None:
        self._tables_S = torch.tensor(tables, dtype=torch.int64, device=device)
        self._worth = worth
        self._native = native.available_on(device)

    def repeating(
        self,
        ids_N: torch.Tensor,
        lengths_B: torch.Tensor,
        weights_N: torch.Tensor | None,
        bags: Sequence[int],
        looks: Sequence[bool],
    ) -> list[bool]:
        """Returns which slots had better look; by the C++ operators only.

        Whoever does not need distinct bags if hardly any repeat asks this first, which takes a
        fraction of the time.  The arguments are those of a call.
        """
        weights_N = None if weights_N is None else weights_N.detach().float().contiguous()
        repeating: list[bool] = torch.ops.fusedrec.repeating_slots(
            ids_N.contiguous(),
            lengths_B.int().contiguous(),
            weights_N,
            list(bags),
            torch.tensor(looks, dtype=torch.bool),
            self._worth,
        ).tolist()
        return repeating

    def __call__(
        self,
        ids_N: torch.Tensor,
        lengths_B: torch.Tensor,
        weights_N: torch.Tensor | None,
        bags: Sequence[int],
        looks: Sequence[bool],
    ) -> DistinctBags:
        """Finds the distinct bags of a batch.

        Args:
            ids_N: the ids, bag after bag.
            lengths_B: how many each bag has.
            weights_N: their weights; None if they have none.
            bags: bags of each slot, which come slot after slot.
            looks: whether each slot looks for equal bags; if not, all its bags are distinct.
        """
        looks_S = to_device(list(map(int, looks)), ids_N.device).bool()
        weights_N = None if weights_N is None else weights_N.detach().float().contiguous()
        number = torch.ops.fusedrec.distinct_bags if self._native else by_sort
        number_B, lengths_G, ids_M, weights_M, counts_3S = number(
            ids_N.contiguous(),
            lengths_B.int().contiguous(),
            weights_N,
            list(bags),
            self._tables_S,
            looks_S,
            self._worth,
        )
        bags_S, ids_S, full_S = counts_3S.tolist()
        return DistinctBags(number_B, lengths_G, ids_M, weights_M, bags_S, ids_S, sum(full_S))


def by_sort(
    ids_N: torch.Tensor,
    lengths_B: torch.Tensor,
    weights_N: torch.Tensor | None,
    bags: Sequence[int],
    tables_S: torch.Tensor,
    looks_S: torch.Tensor,
    worth: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor]:
    """Does what the C++ operator ``distinct_bags`` does, by torch's own operators."""
    device, slots = ids_N.device, len(bags)
    total = lengths_B.numel()
    bag_B = torch.arange(total, device=device)
    bags_S = to_device(list(bags), device)
    slot_B = torch.arange(slots, device=device).repeat_interleave(bags_S, output_size=total)
    lengths = lengths_B.long()
    starts_B = lengths.cumsum(0) - lengths
    bag_N = bag_B.repeat_interleave(lengths, output_size=ids_N.numel())
    place_N = torch.arange(ids_N.numel(), device=device) - starts_B[bag_N]
    bits_N = None if weights_N is None else weights_N.view(torch.int32)

    hashes = []
    for factor, step in (_MIX[:2], _MIX[2:]):
        mixed_N = (ids_N.long() * factor) ^ ((place_N + 1) * step)
        if bits_N is not None:
            mixed_N = (mixed_N ^ (bits_N.long() * step)) * factor
        mixed_N = mixed_N ^ (mixed_N >> 29)
        hashes.append(torch.zeros_like(lengths).index_add_(0, bag_N, mixed_N * factor))

    is_sampled_B, sampled_S = _sampled(bags_S, slot_B)
    is_sampled_B &= looks_S[slot_B] & (lengths > 0)
    sample = torch.stack([slot_B, lengths, *hashes], dim=1)[is_sampled_B]
    once = torch.unique(sample, dim=0)
    repeats_S = torch.zeros_like(bags_S).index_add_(0, sample[:, 0], torch.ones_like(sample[:, 0]))
    repeats_S.index_add_(0, once[:, 0], torch.ones_like(once[:, 0]), alpha=-1)
    seems_S = repeats_S * bags_S >= worth * sampled_S * sampled_S
    looks_B = (looks_S & (seems_S | (bags_S <= sampled_S)))[slot_B]
    alone_B = torch.where(looks_B, -1, bag_B)  # what does not look is like no other
    kinds = torch.stack([tables_S[slot_B], alone_B, lengths, *hashes], dim=1)
    _, kind_B = torch.unique(kinds, dim=0, return_inverse=True)
    first_B = torch.full_like(bag_B, total).scatter_reduce_(0, kind_B, bag_B, "amin")[kind_B]

    # Bags whose hashes are equal by chance stay apart.
    other_N = (starts_B[first_B])[bag_N] + place_N
    differs_N = ids_N != ids_N[other_N]
    if bits_N is not None:
        differs_N |= bits_N != bits_N[other_N]
    differs_B = torch.zeros_like(lengths).index_add_(0, bag_N, differs_N.long()) > 0
    first_B = torch.where(differs_B, bag_B, first_B)

    is_first_B = (first_B == bag_B) & (lengths > 0)
    number_B = (is_first_B.cumsum(0) - 1)[first_B]
    number_B = torch.where(lengths > 0, number_B, -1).int()
    taken_N = is_first_B[bag_N]
    counts_3S = torch.zeros(3, slots, dtype=torch.int64, device=device)
    counts_3S[0].index_add_(0, slot_B, is_first_B.long())
    counts_3S[1].index_add_(0, slot_B, is_first_B * lengths)
    counts_3S[2].index_add_(0, slot_B, (lengths > 0).long())
    weights_M = None if weights_N is None else weights_N[taken_N]
    return number_B, lengths_B[is_first_B], ids_N[taken_N], weights_M, counts_3S


def _sampled(bags_S: torch.Tensor, slot_B: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns whether each bag is in the sample of its slot, and how many bags that has.

    The same as ``Sample`` of ``core/native/bags.h``.
    """
    least_S = torch.where(bags_S <= ALL, ALL, (bags_S // 2).clamp(max=LEAST))
    runs_S = torch.maximum(bags_S // PART, least_S) // RUN
    is_all_S = bags_S <= runs_S * RUN
    bags_B, runs_B = bags_S[slot_B], runs_S[slot_B]
    bag_B = torch.arange(slot_B.numel(), device=slot_B.device)
    bag_B = bag_B - (bags_S.cumsum(0) - bags_S)[slot_B]
    run_B = ((bag_B + 1) * runs_B - 1) // bags_B  # in whose part of the slot it is
    mixed_B = (run_B + _MIX_RUN[0]) * _MIX_RUN[1] & 0xFFFFFFFF
    mixed_B = (mixed_B ^ (mixed_B >> 15)) * _MIX_RUN[2] & 0xFFFFFFFF
    room_B = (bags_B // runs_B - RUN + 1).clamp(min=1)
    place_B = bag_B - run_B * bags_B // runs_B - (mixed_B >> 16) % room_B
    return is_all_S[slot_B] | ((place_B >= 0) & (place_B < RUN)), torch.where(
        is_all_S, bags_S, runs_S * RUN
    )
