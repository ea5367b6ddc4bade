"""Which received rows form which output row.

A *bag* is the ids of one sample in one feature; pooled, it becomes one row of output.  TorchRec's
output is [batch, sum of dims], so bags are put in the order (sample, slot): the pooled rows then
*are* the output, without a transposing copy.  Only row numbers are permuted, not rows.

With a variable batch size per feature (VBE) TorchRec wants the order (slot, sample), and for a
sequence each id is a bag of its own: both leave the ids where they are.
"""

from dataclasses import dataclass, replace

import torch
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor
from torchrec.streamable import Multistreamable

from fusedrec_torchrec.core.transfer import to_device
from fusedrec_torchrec.exchange.buckets import Bucket
from fusedrec_torchrec.exchange.dedup import Occurrences
from fusedrec_torchrec.exchange.distinct_bags import DistinctBags
from fusedrec_torchrec.exchange.row_numbers import BucketRows
from fusedrec_torchrec.exchange.slot_features import SlotFeatures

__all__ = [
    "Bags",
    "copied_bags",
    "distinct_bags",
    "ordered_bags",
    "pooled_bags",
    "sequence_bags",
]


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
        occurrences: positions in ``rows_N`` of the ids of each row; None if not known.  There may
            be more starts than rows.
        some_empty: whether every id is its own bag, but the number of rows in the place of a row
            number stands for an empty bag.
        copies: which output rows show which of these bags, if these are distinct ones; else the
            bags are the output.
    """

    rows_N: torch.Tensor
    offsets_B1: torch.Tensor | None = None
    divisor_B: torch.Tensor | None = None
    order_N: torch.Tensor | None = None
    width: int = 0
    occurrences: Occurrences | None = None
    some_empty: bool = False
    copies: "Bags | None" = None

    @property
    def output(self) -> "Bags":
        """What is shown in the output."""
        return self.copies or self

    def record_stream(self, stream: torch.Stream) -> None:
        if self.copies is not None:
            self.copies.record_stream(stream)
        tensors = [self.rows_N, self.offsets_B1, self.divisor_B, self.order_N]
        if self.occurrences is not None:
            tensors += [self.occurrences.order_N, self.occurrences.starts_U1]
        for tensor in tensors:
            if tensor is not None:
                tensor.record_stream(stream)

    @property
    def num_bags(self) -> int:
        return (self.rows_N if self.offsets_B1 is None else self.offsets_B1[1:]).numel()

    def with_offsets(self, rows: int) -> "Bags":
        """Returns the same bags, without ids in empty ones; ``rows`` is the number of rows."""
        if not self.some_empty:
            return self
        filled = self.rows_N < rows
        return replace(
            self, rows_N=self.rows_N[filled], offsets_B1=_offsets(filled), some_empty=False
        )

    def in_bag_order(self, values_N: torch.Tensor) -> torch.Tensor:
        """Puts values of the ids, in the order of the batch, into the order of ``rows_N``."""
        if self.order_N is not None:
            return values_N.index_select(0, self.order_N)
        if self.width and self.offsets_B1 is None:
            return values_N.view(self.width, -1).t().reshape(-1)
        return values_N

    def bag_of_id(self) -> torch.Tensor | None:
        """Returns the bag of each id; None where bag i is id i."""
        if self.offsets_B1 is None:
            return None
        return torch.repeat_interleave(
            torch.arange(self.num_bags, dtype=torch.int32, device=self.rows_N.device),
            self.offsets_B1.diff(),
            output_size=self.rows_N.numel(),
        )


def sequence_bags(rows: BucketRows) -> Bags:
    """Makes every id a bag, in the order of the batch."""
    return Bags(rows_N=rows.rows_N, occurrences=rows.occurrences)


def ordered_bags(rows: BucketRows, slots: int, mean_S: torch.Tensor | None) -> Bags:
    """Makes the bags of a bucket whose ids are in the order (sample, slot).

    Args:
        rows: the ids.
        slots: of the bucket.
        mean_S: whether each slot is mean-pooled; None if none is.
    """
    divisor_B = None
    if rows.offsets_B1 is not None and mean_S is not None:
        lengths_B = rows.offsets_B1.diff()
        divisor_B = _divisor(lengths_B, mean_S.repeat(lengths_B.numel() // slots))
    return Bags(rows.rows_N, rows.offsets_B1, divisor_B, width=slots)


def pooled_bags(
    features: KeyedJaggedTensor,
    bucket: Bucket,
    rows: BucketRows,
    mean_S: torch.Tensor | None,
) -> Bags:
    """Makes the bags of a bucket's slots.

    Args:
        features: the batch in slot order, all buckets.
        bucket: the bucket.
        rows: the ids of this bucket, in the order of the batch.
        mean_S: [slots of the bucket] whether a slot is mean-pooled; None if none is.
    """
    row_N, occurrences = rows.rows_N, rows.occurrences
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
        return Bags(row_N, _offsets(lengths), _divisor(lengths, mean_bags), occurrences=occurrences)

    batch = features.stride()
    if lengths.device.type == "cpu" and ids == bags and (not ids or int(lengths.max()) == 1):
        moved_to = None if occurrences is None else _transposed(ids, batch, slots, lengths.device)
        return Bags(
            row_N.view(slots, batch).t().reshape(-1),
            width=slots,
            occurrences=_moved(occurrences, moved_to),
        )
    lengths, order, _ = torch.ops.fbgemm.permute_1D_sparse_data(
        _transposed(bags, slots, batch, lengths.device),
        lengths.int(),
        torch.arange(ids, dtype=torch.int32, device=lengths.device),
        None,
        ids,
    )
    moved_to = None
    if occurrences is not None:
        moved_to = torch.empty_like(order).scatter_(
            0, order.long(), torch.arange(ids, dtype=torch.int32, device=order.device)
        )
    return Bags(
        row_N.index_select(0, order),
        _offsets(lengths),
        _divisor(lengths, None if mean_S is None else mean_S.repeat(batch)),
        order,
        width=slots,
        occurrences=_moved(occurrences, moved_to),
    )


def copied_bags(cells: torch.Tensor, divisor: torch.Tensor | None, width: int) -> Bags:
    """Makes bags of one row each, or of none.

    Args:
        cells: the row of each bag; the number of rows if it is empty.
        divisor: what each bag is divided by; None if nothing is.
        width: bags side by side in one output row; 0 for one bag per output row.
    """
    return Bags(cells, divisor_B=divisor, width=width, some_empty=True)


def distinct_bags(
    slots: SlotFeatures,
    distinct: DistinctBags,
    own: slice,
    rows: BucketRows,
    mean_S: torch.Tensor | None,
) -> Bags:
    """Makes the distinct bags of a bucket's slots, and their copies.

    Args:
        slots: the batch.
        distinct: its distinct bags.
        own: the slots of the bucket.
        rows: the ids of this bucket, in the order of the distinct bags.
        mean_S: [slots of the bucket] whether a slot is mean-pooled; None if none is.
    """
    first, count = sum(distinct.bags_S[: own.start]), sum(distinct.bags_S[own])
    lengths_G = distinct.lengths_G[first : first + count]
    strides = slots.strides[own]
    first_bag = sum(slots.strides[: own.start])
    number_B = distinct.number_B[first_bag : first_bag + sum(strides)]
    cells = torch.where(number_B < 0, count, number_B - first)
    width = 0
    if slots.side_by_side:
        width = len(strides)
        cells = cells.view(width, -1).t().reshape(-1)
    mean_G = None
    if mean_S is not None:
        repeats = to_device(distinct.bags_S[own], mean_S.device)
        mean_G = mean_S.repeat_interleave(repeats, output_size=count)
    return Bags(
        rows.rows_N,
        _offsets(lengths_G),
        _divisor(lengths_G, mean_G),
        occurrences=rows.occurrences,
        copies=copied_bags(cells, None, width),
    )


def _transposed(count: int, rows: int, columns: int, device: torch.device) -> torch.Tensor:
    """Returns the positions of the elements of a [rows, columns] matrix, column after column."""
    return torch.arange(count, dtype=torch.int32, device=device).view(rows, columns).t().reshape(-1)


def _moved(occurrences: Occurrences | None, moved_to: torch.Tensor | None) -> Occurrences | None:
    """Returns the occurrences after the id at position i has moved to ``moved_to[i]``."""
    if occurrences is None or moved_to is None:
        return occurrences
    return Occurrences(moved_to.index_select(0, occurrences.order_N), occurrences.starts_U1)


def _offsets(lengths: torch.Tensor) -> torch.Tensor:
    return torch.ops.fbgemm.asynchronous_complete_cumsum(lengths.int())


def _divisor(lengths: torch.Tensor, mean_bags: torch.Tensor | None) -> torch.Tensor | None:
    """Returns the length of mean-pooled bags, 1 for sums and for empty bags (which stay zero)."""
    if mean_bags is None:
        return None
    return torch.where(mean_bags, lengths.clamp(min=1), 1).float()
