"""The part of a batch that belongs to some consecutive slots."""

from collections.abc import Callable
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
        ids_per_slot: ids of each slot.  On CUDA, who asks for it waits for the device, unless the
            batch knows it already.
        side_by_side: whether all slots have as many bags, which lie side by side in the output;
            not so if the batch size varies by feature.
    """

    ids_N: torch.Tensor
    lengths_B: torch.Tensor
    weights_N: torch.Tensor | None
    strides: list[int]
    side_by_side: bool
    count_ids: Callable[[], list[int]]

    @property
    def ids_per_slot(self) -> list[int]:
        return self.count_ids()

    @classmethod
    def of(
        cls, features: KeyedJaggedTensor, first: int, end: int, weighted: bool
    ) -> "SlotFeatures":
        """Returns the slots from ``first`` to ``end`` of a batch."""
        strides = features.stride_per_key()
        ids = slice(None)
        if first > 0 or end < len(strides):
            counts = features.length_per_key()
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
            not features.variable_stride_per_key(),
            lambda: features.length_per_key()[first:end],
        )
