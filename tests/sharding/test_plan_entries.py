"""Generators of plan entries hand on all that they are given, whatever the sharding."""

import pytest
import torch
from torch import nn

import fusedrec_torchrec as fr
from fusedrec_torchrec.sharding.plan_entries import FusedParameterSharding

GENERATORS = {
    "fused_row_wise": lambda **given: fr.fused_row_wise(**given),
    "fused_table_wise": lambda **given: fr.fused_table_wise(1, **given),
    "fused_column_wise": lambda **given: fr.fused_column_wise([1, 0], **given),
}


def entry_of(kind: str, **given: object) -> FusedParameterSharding:
    weight = nn.Parameter(torch.empty(10, 8, device="meta"))
    sharder = fr.FusedEmbeddingBagCollectionSharder()
    entry = GENERATORS[kind](**given)(weight, 2, 2, "cpu", sharder)
    assert isinstance(entry, FusedParameterSharding) and entry.sharding_type == kind
    return entry


@pytest.mark.parametrize("kind", GENERATORS)
def test_settings_of_a_table_are_in_its_entry(kind: str) -> None:
    codecs = fr.Codecs(forward=fr.CodecOptions(type="fp16"))
    plain = entry_of(kind)
    assert plain.codecs is None and plain.input_dist is None and plain.compute_kernel == "fused"
    given = entry_of(kind, codecs=codecs, input_dist="exact_counts", compute_kernel="dense")
    assert given.codecs == codecs and given.input_dist == "exact_counts"
    assert given.compute_kernel == "dense"
    assert given.ranks == plain.ranks
