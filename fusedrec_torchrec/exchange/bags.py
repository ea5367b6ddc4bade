"""Which received rows form which output row.

A *bag* is the ids of one sample in one feature; pooled, it becomes one row of output.  TorchRec's
output is [batch, sum of dims], so bags are put in the order (sample, slot): the pooled rows then
*are* the output, without a transposing copy.  Only row numbers are permuted, not rows.

With a variable batch size per feature (VBE) TorchRec wants the order (slot, sample), and for a
sequence each id is a bag of its own: both leave the ids where they are.
"""

from dataclasses import dataclass

import torch
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor
from torchrec.streamable import Multistreamable

from fusedrec_torchrec.core.transfer import to_device
from fusedrec_torchrec.exchange.buckets import Bucket
from fusedrec_torchrec.exchange.dedup import Grouping

__all__ = ["Bags", "pooled_bags", "sequence_bags"]


@dataclass
class Bags(Multistreamable):
    """The bags of one bucket, B bags over N ids.

    Attributes:
        rows_N: row number of each id in the bucket's matrix of received rows, bag after bag.
        offsets_B1: where each bag starts in ``rows_N``; None if every id is its own bag.
        divisor_B: what each bag's sum is divided by (mean pooling); None for sums.
        order_N: where each of ``rows_N`` stood in the batch; None if they did not move, or if
            every bag has one id and is one of ``width`` side by side.
        width: number of slots side by side in one output row; 0 for one bag per output row.
        grouping: positions in ``rows_N`` of the ids of each row; None if not known.  There may be
            more starts than rows.
    """

    rows_N: torch.Tensor
    offsets_B1: torch.Tensor | None = None
    divisor_B: torch.Tensor | None = None
    order_N: torch.Tensor | None = None
    width: int = 0
    grouping: Grouping | None = None

    def record_stream(self, stream: torch.Stream) -> None:
        tensors = [self.rows_N, self.offsets_B1, self.divisor_B, self.order_N]
        if self.grouping is not None:
            tensors += [self.grouping.order_N, self.grouping.starts_U1]
        for tensor in tensors:
            if tensor is not None:
                tensor.record_stream(stream)

    @property
    def num_bags(self) -> int:
        return (self.rows_N if self.offsets_B1 is None else self.offsets_B1[1:]).numel()

    def in_bag_order(self, values_N: torch.Tensor) -> torch.Tensor:
        """Values of the ids in the order of the batch, in the order of ``rows_N``."""
        if self.order_N is not None:
            return values_N.index_select(0, self.order_N)
        if self.width and self.offsets_B1 is None:
            return values_N.view(self.width, -1).t().reshape(-1)
        return values_N

    def bag_of_id(self) -> torch.Tensor | None:
        """The bag of each id; None where bag i is id i."""
        if self.offsets_B1 is None:
            return None
        return torch.repeat_interleave(
            torch.arange(self.num_bags, dtype=torch.int32, device=self.rows_N.device),
            self.offsets_B1.diff(),
            output_size=self.rows_N.numel(),
        )


def sequence_bags(row_N: torch.Tensor, grouping: Grouping | None = None) -> Bags:
    """Every id is a bag, in the order of the batch."""
    return Bags(rows_N=row_N, grouping=grouping)


def pooled_bags(
    features: KeyedJaggedTensor,
    bucket: Bucket,
    row_N: torch.Tensor,
    mean_S: torch.Tensor | None,
    grouping: Grouping | None = None,
) -> Bags:
    """The bags of a bucket's slots.

    Args:
        features: the batch in slot order, all buckets.
        bucket: the bucket.
        row_N: row number of each id of this bucket, in the order of the batch.
        mean_S: [slots of the bucket] whether a slot is mean-pooled; None if none is.
        grouping: positions in ``row_N`` of the ids of each row.
    """
    slots = bucket.end_slot - bucket.first_slot
    strides = features.stride_per_key()
    first_bag = sum(strides[: bucket.first_slot])
    bags = sum(strides[bucket.first_slot : bucket.end_slot])
    lengths = features.lengths()[first_bag : first_bag + bags]
    ids = row_N.numel()

    if features.variable_stride_per_key():
        mean_bags = None
        if mean_S is not None:
            repeats = to_device(strides[bucket.first_slot : bucket.end_slot], mean_S.device)
            mean_bags = mean_S.repeat_interleave(repeats, output_size=bags)
        return Bags(row_N, _offsets(lengths), _divisor(lengths, mean_bags), grouping=grouping)

    batch = features.stride()
    if lengths.device.type == "cpu" and ids == bags and (not ids or int(lengths.max()) == 1):
        moved_to = None if grouping is None else _transposed(ids, batch, slots, lengths.device)
        return Bags(
            row_N.view(slots, batch).t().reshape(-1),
            width=slots,
            grouping=_moved(grouping, moved_to),
        )
    lengths, order, _ = torch.ops.fbgemm.permute_1D_sparse_data(
        _transposed(bags, slots, batch, lengths.device),
        lengths.int(),
        torch.arange(ids, dtype=torch.int32, device=lengths.device),
        None,
        ids,
    )
    moved_to = None
    if grouping is not None:
        moved_to = torch.empty_like(order).scatter_(
            0, order.long(), torch.arange(ids, dtype=torch.int32, device=order.device)
        )
    return Bags(
        row_N.index_select(0, order),
        _offsets(lengths),
        _divisor(lengths, None if mean_S is None else mean_S.repeat(batch)),
        order,
        width=slots,
        grouping=_moved(grouping, moved_to),
    )


def _transposed(count: int, rows: int, columns: int, device: torch.device) -> torch.Tensor:
    """Positions of the elements of a [rows, columns] matrix, column after column."""
    return torch.arange(count, dtype=torch.int32, device=device).view(rows, columns).t().reshape(-1)


def _moved(grouping: Grouping | None, moved_to: torch.Tensor | None) -> Grouping | None:
    """The grouping after the id at position i has moved to ``moved_to[i]``."""
    if grouping is None or moved_to is None:
        return grouping
    return Grouping(moved_to.index_select(0, grouping.order_N), grouping.starts_U1)


def _offsets(lengths: torch.Tensor) -> torch.Tensor:
    return torch.ops.fbgemm.asynchronous_complete_cumsum(lengths.int())


def _divisor(lengths: torch.Tensor, mean_bags: torch.Tensor | None) -> torch.Tensor | None:
    """Length of mean-pooled bags, 1 for sums and for empty bags (which stay zero)."""
    if mean_bags is None:
        return None
    return torch.where(mean_bags, lengths.clamp(min=1), 1).float()
