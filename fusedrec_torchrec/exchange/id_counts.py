"""How many ids each slot of a batch has, on CUDA: told to the host without a wait of its own.

The counts are sent to the host before the ids are sent to their owners, so that they have come
when the host has read the headers of the messages, which is the one wait of a batch.
"""

from itertools import accumulate, pairwise

import torch
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from fusedrec_torchrec.core.transfer import ToHost, to_device

__all__ = ["IdCounts", "slot_starts", "with_counts"]


def slot_starts(features: KeyedJaggedTensor, slots: int) -> torch.Tensor:
    """Returns where the ids of the first slots begin, and where those of the last one end."""
    offsets = features.offsets()
    if features.variable_stride_per_key():
        strides = features.stride_per_key()[:slots]
        return offsets.index_select(0, to_device([0, *accumulate(strides)], offsets.device))
    batch = features.stride()
    return offsets[: slots * batch + 1 : batch] if batch else offsets.new_zeros(slots + 1)


class IdCounts:
    """Counts on their way to the host.

    Args:
        starts_S1: where the ids of slots begin, and where the last ones end.
    """

    def __init__(self, starts_S1: torch.Tensor) -> None:
        self._starts = ToHost(starts_S1)

    def per_slot(self) -> list[int]:
        """Returns them; waits only if they have not come yet, which they have with the headers."""
        return [end - start for start, end in pairwise(self._starts.numbers())]


def with_counts(features: KeyedJaggedTensor, counts: list[int]) -> KeyedJaggedTensor:
    """Returns a batch that knows how many ids each feature has, without others behind them."""
    variable, weights, ids = features.variable_stride_per_key(), features.weights_or_none(), None
    if features.values().numel() > sum(counts):
        ids = sum(counts)
    return KeyedJaggedTensor(
        keys=features.keys(),
        values=features.values()[:ids],
        weights=None if weights is None else weights[:ids],
        lengths=features.lengths(),
        offsets=features.offsets(),
        stride=None if variable else features.stride(),
        stride_per_key_per_rank=features.stride_per_key_per_rank() if variable else None,
        length_per_key=counts,
        inverse_indices=features.inverse_indices_or_none(),
    )
