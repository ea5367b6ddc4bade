"""Sequences of a variable batch per feature, in the order of the inverse indices.

With a variable batch per feature (VBE) a sample's sequence is the one its inverse index picks,
so a sequence can be picked by several samples.  TorchRec expands the looked-up rows with a
permutation kernel whose backward, on CPU, keeps the gradient of only one of them.  Here the row
numbers are expanded instead, before the rows are gathered: every pick adds its gradient.

How many ids that makes is known to the device only.  Where nobody counts ids on the host, the
numbers are sent there with the batch, and sequences are expanded after the host has read the
headers.
"""

from itertools import accumulate

import torch
from torchrec.modules.utils import SequenceVBEContext
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from fusedrec_torchrec.core.transfer import ToHost, to_device
from fusedrec_torchrec.exchange.bags import sequence_bags
from fusedrec_torchrec.exchange.buckets import Bucket
from fusedrec_torchrec.exchange.context import FusedShardingContext
from fusedrec_torchrec.exchange.row_numbers import BucketRows
from fusedrec_torchrec.exchange.slot_sequences import SlotSequences

__all__ = ["SequencePicks", "count_sequences", "expand_sequences"]


class SequencePicks:
    """Which sequences the samples of a variable batch pick.

    Args:
        features: the batch in canonical form.
        need_indices: whether the output has ids, too.
    """

    def __init__(self, features: KeyedJaggedTensor, need_indices: bool) -> None:
        inverse = features.inverse_indices_or_none()
        assert inverse is not None
        names, indices = inverse
        strides, device = features.stride_per_key(), indices.device
        keys = features.keys()
        rows = [names.index(key) for key in keys]
        numbers = to_device([*rows, *accumulate(strides[:-1], initial=0)], device)
        rows_S, firsts_S = numbers.split(len(strides))
        self._features = features
        self._need_indices = need_indices
        self._picks = (indices.index_select(0, rows_S) + firsts_S[:, None]).flatten().int()
        lengths = features.lengths().index_select(0, self._picks)
        self._lengths = lengths.view(len(strides), -1)
        self._counts = ToHost(self._lengths.sum(1))

    def counted(self) -> SequenceVBEContext:
        """Returns them as TorchRec has them; waits if the counts have not come yet."""
        counts, ids = self._counts.numbers(), None
        if self._need_indices:
            _, ids, _ = torch.ops.fbgemm.permute_1D_sparse_data(
                self._picks,
                self._features.lengths(),
                self._features.values(),
                None,
                sum(counts),
            )
        return SequenceVBEContext(
            recat=self._picks,
            unpadded_lengths=self._features.lengths(),
            reindexed_lengths=self._lengths,
            reindexed_length_per_key=counts,
            reindexed_values=ids,
        )

    def record_stream(self, stream: torch.Stream) -> None:
        """Keeps memory from being given away while a stream may use it."""
        self._picks.record_stream(stream)
        self._lengths.record_stream(stream)


def expand_sequences(
    context: FusedShardingContext, vbe: SequenceVBEContext, buckets: list[Bucket]
) -> None:
    """Replaces the batch's own sequences in the context by those of its samples."""
    features, sequences = context.features_before_input_dist, context.slot_bags
    assert features is not None
    lengths = vbe.reindexed_length_per_key
    _, row_N, _ = torch.ops.fbgemm.permute_1D_sparse_data(
        vbe.recat,
        vbe.unpadded_lengths,
        sequences.rows_N
        if isinstance(sequences, SlotSequences)
        else torch.cat([bags.rows_N for bags in context.bags]),
        None,
        sum(lengths),
    )
    if isinstance(sequences, SlotSequences):
        context.slot_bags = SlotSequences(row_N)
    else:
        context.ids_per_bucket = [sum(lengths[b.first_slot : b.end_slot]) for b in buckets]
        context.bags = [
            sequence_bags(BucketRows(rows)) for rows in row_N.split(context.ids_per_bucket)
        ]
    context.features_before_input_dist = KeyedJaggedTensor(
        keys=features.keys(),
        values=row_N if vbe.reindexed_values is None else vbe.reindexed_values,
        lengths=vbe.reindexed_lengths.flatten(),
        stride=vbe.reindexed_lengths.size(1),
        length_per_key=lengths,
    )
    context.counts, context.variable_batch_per_feature = None, False


def count_sequences(context: FusedShardingContext, buckets: list[Bucket]) -> None:
    """Has the context of a batch that has arrived know how many ids its sequences have."""
    picks, context.picks = context.picks, None
    if picks is not None:
        expand_sequences(context, picks.counted(), buckets)
    context.count_features()
    if isinstance(context.slot_bags, SlotSequences):
        assert context.features_before_input_dist is not None
        ids = context.features_before_input_dist.values().numel()
        context.slot_bags = SlotSequences(context.slot_bags.rows_N[:ids])
