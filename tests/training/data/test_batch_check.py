"""Batches with weights: bad ones are found, and what stands in for a batch has none."""

import pytest
import torch
from torchrec.datasets.utils import Batch
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from fusedrec_torchrec.training.data.batch_check import BatchCheck, stand_in

CHECK = BatchCheck({"item": 5, "viewed": 5})


def batch(weights: list[float] | None) -> Batch:
    features = KeyedJaggedTensor(
        keys=["item", "viewed"],
        values=torch.tensor([1, 2, 3, 4]),
        lengths=torch.tensor([1, 1, 2, 0]),
        weights=None if weights is None else torch.tensor(weights),
    )
    return Batch(torch.zeros(2, 0), features, torch.tensor([0.0, 1.0]))


@pytest.mark.parametrize("weight", [float("nan"), float("inf")])
def test_weights_that_are_no_numbers_are_named(weight: float) -> None:
    assert CHECK(batch([1.0, 2.0, 3.0, 4.0])) is None and CHECK(batch(None)) is None
    problem = f"an id has weight {weight}, must be a finite number"
    assert CHECK(batch([1.0, weight, 3.0, 4.0])) == problem


@pytest.mark.parametrize("weights", [None, [1.0, 2.0, 3.0, 4.0]])
def test_what_stands_in_for_a_batch_has_its_form_and_no_ids(weights: list[float] | None) -> None:
    features = stand_in(batch(weights)).sparse_features
    assert features.keys() == ["item", "viewed"] and features.stride() == 2
    assert not len(features.values()) and not features.lengths().any()
    got = features.weights_or_none()
    assert got is None if weights is None else len(got) == 0
