"""Which received rows form which output row, for all slots of a batch at once, on CUDA.

Ids and bags stay where the batch has them, slot after slot.  The host knows nothing of them but how
many there are: which bag has which ids is for the device to know.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor
from torchrec.streamable import Multistreamable

from fusedrec_torchrec.core import operators
from fusedrec_torchrec.exchange.buckets import Bucket

__all__ = ["RowIds", "SlotBags", "SlotColumns", "are_counted_on_device"]


def are_counted_on_device(features: KeyedJaggedTensor) -> bool:
    """Tells whether the ids of a batch that is pooled need not be counted on the host."""
    values, weights = features.values(), features.weights_or_none()
    if not isinstance(values, torch.Tensor) or not values.is_cuda:
        return False
    return (
        not features.variable_stride_per_key()
        and (weights is None or not weights.requires_grad)
        and operators.available_on(
            values.device, "number_batch_rows", "slot_bag_sums", "slot_row_sums"
        )
    )


@dataclass(frozen=True)
class SlotColumns:
    """Where slots are in the output.

    Attributes:
        dims: of the buckets that they are of.
        width: columns of all of them.
        slots_S3: for each its dimension, its first column, and whether it takes means.
    """

    dims: list[int]
    width: int
    slots_S3: torch.Tensor

    def in_order(self, order_S: torch.Tensor) -> "SlotColumns":
        """Returns the columns of the same slots in another order."""
        return replace(self, slots_S3=self.slots_S3[order_S])

    @classmethod
    def of(
        cls, buckets: Sequence[Bucket], means: Sequence[bool], device: torch.device
    ) -> "SlotColumns":
        """Returns the columns of the slots of some buckets, bucket after bucket.

        Args:
            buckets: whose slots come first in the batch.
            means: whether each slot is mean-pooled.
            device: of the batches.
        """
        slots, column = [], 0
        for bucket in buckets:
            for slot in range(bucket.first_slot, bucket.end_slot):
                slots.append([bucket.dim, column, int(means[slot])])
                column += bucket.dim
        slots_S3 = torch.tensor(slots, dtype=torch.int64, device=device).view(-1, 3)
        return cls([bucket.dim for bucket in buckets], column, slots_S3)


class RowIds(NamedTuple):
    """Which ids a row has, as the kernels of ``core/gpu/row_numbers.py`` tell it.

    Attributes:
        ranks_N: for each id its number among those of its row, int32.
        segments_U2: for each row where its ids begin in an order of all ids, and how many they are;
            as long as there are ids.
        cursors: how long that order is.
    """

    ranks_N: torch.Tensor
    segments_U2: torch.Tensor
    cursors: torch.Tensor


@dataclass
class SlotBags(Multistreamable):
    """The bags of some slots of a batch.

    Attributes:
        columns: where they are in the output.
        rows_N: the row of each id among those of all buckets; ids of other slots are at the end.
        offsets_B1: where bags begin among these, int32; those of other slots are at the end.
        weights_N: of the ids, float32; None if all count once.
        row_ids: which of the ids a row has, for the way back.
        batch: bags of each slot.
    """

    columns: SlotColumns
    rows_N: torch.Tensor
    offsets_B1: torch.Tensor
    weights_N: torch.Tensor | None
    row_ids: RowIds
    batch: int

    def record_stream(self, stream: torch.Stream) -> None:
        for tensor in (self.rows_N, self.offsets_B1, self.weights_N, *self.row_ids):
            if tensor is not None:
                tensor.record_stream(stream)
