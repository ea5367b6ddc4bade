"""Bags with more ids than their feature processor has weights for."""

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from itertools import accumulate

import torch
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from fusedrec_torchrec.core.transfer import to_device

__all__ = ["LengthLimits"]


class LengthLimits:
    """Finds bags that have more ids than their feature may have.

    Args:
        max_lengths: by feature; others may have any number of ids.
        features: of each slot of the module, in order.
        device: where batches are.
    """

    def __init__(
        self, max_lengths: Mapping[str, int], features: Sequence[str], device: torch.device
    ) -> None:
        self._max_lengths = dict(max_lengths)
        no_limit = torch.iinfo(torch.int32).max
        limits = [self._max_lengths.get(feature, no_limit) for feature in features]
        self._max_lengths_S = to_device(limits, device)

    def _too_long(self, batch: KeyedJaggedTensor) -> torch.Tensor:
        """Returns which bags of a batch have too many ids."""
        lengths = batch.lengths()
        strides_S = to_device(batch.stride_per_key(), self._max_lengths_S.device)
        return lengths > self._max_lengths_S.repeat_interleave(
            strides_S, output_size=lengths.numel()
        )

    def bad(self, batch: KeyedJaggedTensor) -> torch.Tensor:
        """Returns whether any bag has too many ids, as a 0-dim tensor on the device."""
        return self._too_long(batch).any()

    def describe(self, batch: KeyedJaggedTensor) -> str:
        """Returns the error message for the first such bag."""
        where = int(self._too_long(batch).nonzero()[0])
        slot = bisect_right(list(accumulate(batch.stride_per_key())), where)
        feature = batch.keys()[slot]
        return (
            f"feature {feature!r}: a sample has {int(batch.lengths()[where])} ids, must have at "
            f"most {self._max_lengths[feature]}, the number of its position weights"
        )
