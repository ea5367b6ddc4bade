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

from fusedrec_torchrec.exchange.layout import Bucket
from fusedrec_torchrec.exchange.transfer import to_device

__all__ = ["Bags", "pooled_bags", "sequence_bags"]


@dataclass
class Bags(Multistreamable):
    """The bags of one bucket, B bags over N ids.

    Attributes:
        rows_N: row number of each id in the bucket's matrix of received rows, bag after bag.
        offsets_B1: where each bag starts in ``rows_N``; None if every id is its own bag.
        divisor_B1: [B, 1] what each bag's sum is divided by (mean pooling); None for sums.
        order_N: where each of ``rows_N`` stood in the batch; None if they did not move.
        width: number of slots side by side in one output row; 0 for one bag per output row.
    """

    rows_N: torch.Tensor
    offsets_B1: torch.Tensor | None = None
    divisor_B1: torch.Tensor | None = None
    order_N: torch.Tensor | None = None
    width: int = 0

    def record_stream(self, stream: torch.Stream) -> None:
        for tensor in (self.rows_N, self.offsets_B1, self.divisor_B1, self.order_N):
            if tensor is not None:
                tensor.record_stream(stream)

    @property
    def num_bags(self) -> int:
        return (self.rows_N if self.offsets_B1 is None else self.offsets_B1[1:]).numel()

    def bag_of_id(self) -> torch.Tensor | None:
        """The bag of each id; None where bag i is id i."""
        if self.offsets_B1 is None:
            return None
        return torch.repeat_interleave(
            torch.arange(self.num_bags, dtype=torch.int32, device=self.rows_N.device),
            self.offsets_B1.diff(),
            output_size=self.rows_N.numel(),
        )


def sequence_bags(row_N: torch.Tensor) -> Bags:
    """Every id is a bag, in the order of the batch."""
    return Bags(rows_N=row_N)


def pooled_bags(
    features: KeyedJaggedTensor,
    bucket: Bucket,
    row_N: torch.Tensor,
    mean_S: torch.Tensor | None,
) -> Bags:
    """The bags of a bucket's slots.

    Args:
        features: the batch in slot order, all buckets.
        bucket: the bucket.
        row_N: row number of each id of this bucket, in the order of the batch.
        mean_S: [slots of the bucket] whether a slot is mean-pooled; None if none is.
    """
    slots = bucket.end_slot - bucket.first_slot
    strides = features.stride_per_key()[bucket.first_slot : bucket.end_slot]
    first_bag = sum(features.stride_per_key()[: bucket.first_slot])
    lengths = features.lengths()[first_bag : first_bag + sum(strides)].int()
    ids = row_N.numel()

    if features.variable_stride_per_key():
        mean_bags = None
        if mean_S is not None:
            repeats = to_device(strides, mean_S.device)
            mean_bags = mean_S.repeat_interleave(repeats, output_size=lengths.numel())
        return Bags(row_N, _offsets(lengths), _divisor(lengths, mean_bags))

    batch = features.stride()
    mean_bags = None if mean_S is None else mean_S.repeat(batch)
    if lengths.device.type == "cpu" and ids == lengths.numel() and bool((lengths == 1).all()):
        order = torch.arange(ids, dtype=torch.int32).view(slots, batch).t().reshape(-1)
        return Bags(row_N.view(slots, batch).t().reshape(-1), order_N=order, width=slots)
    by_sample = (
        torch.arange(lengths.numel(), dtype=torch.int32, device=lengths.device)
        .view(slots, batch)
        .t()
        .reshape(-1)
    )
    lengths, order, _ = torch.ops.fbgemm.permute_1D_sparse_data(
        by_sample,
        lengths,
        torch.arange(ids, dtype=torch.int32, device=lengths.device),
        None,
        ids,
    )
    return Bags(
        row_N.index_select(0, order),
        _offsets(lengths),
        _divisor(lengths, mean_bags),
        order,
        width=slots,
    )


def _offsets(lengths: torch.Tensor) -> torch.Tensor:
    return torch.ops.fbgemm.asynchronous_complete_cumsum(lengths)


def _divisor(lengths: torch.Tensor, mean_bags: torch.Tensor | None) -> torch.Tensor | None:
    """Length of mean-pooled bags, 1 for sums and for empty bags (which stay zero)."""
    if mean_bags is None:
        return None
    return torch.where(mean_bags, lengths.clamp(min=1), 1).float().unsqueeze(1)
