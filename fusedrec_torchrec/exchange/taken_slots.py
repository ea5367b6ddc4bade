"""A batch in the order of slots, on CUDA, without a count of its ids on the host.

It may have more room for ids than ids: whoever looks at them goes by the offsets.
"""

from collections import Counter
from collections.abc import Sequence
from itertools import accumulate

import torch
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from fusedrec_torchrec.core.kept import Kept
from fusedrec_torchrec.core.transfer import to_device

__all__ = ["TakenSlots"]


class TakenSlots:
    """Takes the features of slots out of batches.

    Args:
        names: the feature of each slot.
        device: of the batches.

    Attributes:
        times: how often an id of a batch may come.
    """

    def __init__(self, names: Sequence[str], device: torch.device) -> None:
        self._names = list(names)
        self._device = device
        # An id is taken as often as its feature stands here, so there is room for all of them.
        self.times = max(Counter(names).values(), default=1)
        # Of the last batch, by strides and places of its features: where the kernels find them.
        self._known = Kept[torch.Tensor](lambda places_2S: [places_2S], most=1)

    def __call__(
        self,
        features: KeyedJaggedTensor,
        indices: Sequence[int],
        refused: torch.Tensor | None = None,
    ) -> KeyedJaggedTensor:
        """Returns the features of a batch at some indices, one for each slot.

        Args:
            features: the batch.
            indices: of the features.
            refused: whether its lengths are known to be wrong; None if nobody knows.
        """
        strides = features.stride_per_key()
        own = [strides[i] for i in indices]
        places_2S, offsets = self._places(strides, indices), features.offsets().contiguous()
        ids_N, weights = features.values().contiguous(), features.weights_or_none()
        learned = weights is not None and weights.requires_grad
        if learned:
            # Gradients find their way back by the places of the weights.
            ids_N = torch.arange(ids_N.numel(), device=self._device)
        ids_M, weights_M, lengths_B, offsets_B1 = torch.ops.fusedrec.take_slots(
            ids_N,
            None if weights is None or learned else weights.contiguous(),
            offsets,
            places_2S,
            sum(own),
            self.times * ids_N.numel(),
            refused,
        )
        if learned:
            assert weights is not None
            where_M = ids_M.clamp_(0, max(ids_N.numel() - 1, 0))  # behind the last id is anything
            ids_M, weights_M = features.values()[where_M], weights[where_M]
        variable = features.variable_stride_per_key()
        per_rank = features.stride_per_key_per_rank() if variable else []
        return KeyedJaggedTensor(
            keys=self._names,
            values=ids_M,
            weights=None if weights is None else weights_M,
            lengths=lengths_B,
            offsets=offsets_B1,
            stride=None if variable else features.stride(),
            stride_per_key_per_rank=[per_rank[i] for i in indices] if variable else None,
        )

    def _places(self, strides: list[int], indices: Sequence[int]) -> torch.Tensor:
        """Returns what ``take_slots`` wants to know of slots; mostly as for the batch before."""

        def make() -> torch.Tensor:
            firsts = list(accumulate(strides, initial=0))
            ends = accumulate(strides[i] for i in indices)
            return to_device([*ends, *(firsts[i] for i in indices)], self._device).view(2, -1)

        return self._known.get((tuple(strides), tuple(indices)), make)
