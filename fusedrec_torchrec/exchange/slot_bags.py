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
from fusedrec_torchrec.core.transfer import to_device
from fusedrec_torchrec.exchange.buckets import Bucket

__all__ = ["RowIds", "SlotBags", "SlotColumns", "are_counted_on_device"]


def are_counted_on_device(features: KeyedJaggedTensor) -> bool:
    """Tells whether there are kernels that need no count of a batch's ids on the host."""
    values = features.values()
    return (
        isinstance(values, torch.Tensor)
        and values.is_cuda
        and operators.available_on(
            values.device, "number_batch_rows", "take_slots", "slot_bag_sums", "slot_row_sums"
        )
    )


@dataclass(frozen=True)
class SlotColumns:
    """Where slots are in the output.

    Attributes:
        dims: of the buckets that they are of.
        width: columns of all of them; of the whole output, in one line, if the batch size varies.
        slots: for each its dimension, its first column, and whether it takes means; if the batch
            size varies also its first bag and how many it has.
        slots_S3: the same, for the kernels.
    """

    dims: list[int]
    width: int
    slots: list[list[int]]
    slots_S3: torch.Tensor

    def in_order(self, order: Sequence[int]) -> "SlotColumns":
        """Returns the columns of the same slots in another order."""
        slots = [self.slots[slot] for slot in order]
        return replace(self, slots=slots, slots_S3=_on_device(slots, self.slots_S3.device))

    def of_variable_batch(self, strides: Sequence[int]) -> "SlotColumns":
        """Returns where slots are in the output of a batch whose size varies by slot.

        Args:
            strides: bags of each slot.
        """
        slots, column, bag = [], 0, 0
        for (dim, _, mean), stride in zip(self.slots, strides, strict=True):
            slots.append([dim, column, mean, bag, stride])
            column += stride * dim
            bag += stride
        device = self.slots_S3.device
        return SlotColumns(self.dims, column, slots, _on_device(slots, device))

    def bags(self, batch: int) -> int:
        """Returns how many bags all slots have.

        Args:
            batch: bags of each slot, if all have as many.
        """
        return sum(slot[4] if len(slot) > 3 else batch for slot in self.slots)

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
        return cls([bucket.dim for bucket in buckets], column, slots, _on_device(slots, device))


def _on_device(slots: Sequence[Sequence[int]], device: torch.device) -> torch.Tensor:
    return to_device([number for slot in slots for number in slot], device).view(len(slots), -1)


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
        row_ids: which of the ids a row has, for the way back.
        batch: bags of each slot, or the most that any has.
        side_by_side: whether the bags of a sample are in one line of the output; not so if the
            batch size varies by slot.
    """

    columns: SlotColumns
    rows_N: torch.Tensor
    offsets_B1: torch.Tensor
    row_ids: RowIds
    batch: int
    side_by_side: bool

    def record_stream(self, stream: torch.Stream) -> None:
        for tensor in (self.rows_N, self.offsets_B1, self.columns.slots_S3, *self.row_ids):
            tensor.record_stream(stream)
