"""Sequences of a variable batch per feature, in the order of the inverse indices.

With a variable batch per feature (VBE) a sample's sequence is the one its inverse index picks,
so a sequence can be picked by several samples.  TorchRec expands the looked-up rows with a
permutation kernel whose backward, on CPU, keeps the gradient of only one of them.  Here the row
numbers are expanded instead, before the rows are gathered: every pick adds its gradient.
"""

import torch
from torchrec.modules.utils import SequenceVBEContext
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from fusedrec_torchrec.exchange.bags import sequence_bags
from fusedrec_torchrec.exchange.buckets import Bucket
from fusedrec_torchrec.exchange.context import FusedShardingContext
from fusedrec_torchrec.exchange.row_numbers import BucketRows

__all__ = ["expand_sequences"]


def expand_sequences(
    context: FusedShardingContext, vbe: SequenceVBEContext, buckets: list[Bucket]
) -> None:
    """Replaces the batch's own sequences in the context by those of its samples."""
    features = context.features_before_input_dist
    assert features is not None
    lengths = vbe.reindexed_length_per_key
    _, row_N, _ = torch.ops.fbgemm.permute_1D_sparse_data(
        vbe.recat,
        vbe.unpadded_lengths,
        torch.cat([bags.rows_N for bags in context.bags]),
        None,
        sum(lengths),
    )
    context.ids_per_bucket = [sum(lengths[b.first_slot : b.end_slot]) for b in buckets]
    context.bags = [sequence_bags(BucketRows(rows)) for rows in row_N.split(context.ids_per_bucket)]
    context.features_before_input_dist = KeyedJaggedTensor(
        keys=features.keys(),
        values=row_N if vbe.reindexed_values is None else vbe.reindexed_values,
        lengths=vbe.reindexed_lengths.flatten(),
        stride=vbe.reindexed_lengths.size(1),
        length_per_key=lengths,
    )
