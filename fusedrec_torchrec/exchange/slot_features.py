"""The part of a batch that belongs to some consecutive slots."""

from dataclasses import dataclass

import torch
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

__all__ = ["SlotFeatures"]


@dataclass(frozen=True)
class SlotFeatures:
    """Ids and lengths of consecutive slots of a batch in canonical form.

    Attributes:
        ids_N: the ids, bag after bag.
        lengths_B: how many each bag has.
        weights_N: their weights; None if there are none, or if they do not count.
        strides: bags of each slot.
        ids_per_slot: ids of each slot.
        side_by_side: whether all slots have as many bags, which lie side by side in the output;
            not so if the batch size varies by feature.
    """

    ids_N: torch.Tensor
    lengths_B: torch.Tensor
    weights_N: torch.Tensor | None
    strides: list[int]
    ids_per_slot: list[int]
    side_by_side: bool

    @classmethod
    def of(
        cls, features: KeyedJaggedTensor, first: int, end: int, weighted: bool
    ) -> "SlotFeatures":
        """Returns the slots from ``first`` to ``end`` of a batch."""
        strides, counts = features.stride_per_key(), features.length_per_key()
        ids = slice(sum(counts[:first]), sum(counts[:end]))
        bags = slice(sum(strides[:first]), sum(strides[:end]))
        weights = features.weights_or_none() if weighted else None
        if weights is not None:
            with torch.enable_grad():  # weights may be learned, and TorchRec sends ids without
                weights = weights[ids]
        return cls(
            features.values()[ids],
            features.lengths()[bags],
            weights,
            strides[first:end],
            counts[first:end],
            not features.variable_stride_per_key(),
        )
