"""A bucket's rows on one rank: FBGEMM's own update, and which optimizers are refused."""

from typing import Any

import pytest
import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
    CounterBasedRegularizationDefinition,
    WeightDecayMode,
)
from torch import nn

from fusedrec_torchrec.replicas.replica import Replica, check_replicable
from tests.replicas.kernels import kernel_of, places_of, replica_of


def numbers(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def test_an_empty_replica_is_zero_in_a_table_of_its_own() -> None:
    kernel = kernel_of(rows=5, optimizer="adagrad")
    kernel.table.row_tensors()[0].fill_(3.0)
    replica = Replica.empty(kernel, 7)
    assert [tuple(tensor.shape) for tensor in replica.tensors] == [(7, 4), (7, 4)]
    assert not any(tensor.any() for tensor in replica.tensors)
    replica.update(places_of(0), torch.ones(1, 4), replica.settings())
    assert (kernel.table.row_tensors()[0] == 3.0).all()


def test_a_replica_without_places_has_one_spare_row() -> None:
    replica = replica_of(0, optimizer="rowwise_adagrad")
    assert replica.capacity == 0
    assert [tuple(tensor.shape) for tensor in replica.tensors] == [(1, 4), (1, 1)]


@pytest.mark.parametrize("dtype", ["fp32", "fp16"])
def test_rows_are_looked_up_by_place(dtype: str) -> None:
    replica = replica_of(6, dtype=dtype)
    replica.tensors[0].copy_(torch.arange(24.0).view(6, 4))
    out = torch.full((3, 4), -1.0)
    replica.look_up(places_of(5, 0, 5), out)
    assert out.tolist() == [[20, 21, 22, 23], [0, 1, 2, 3], [20, 21, 22, 23]]


@pytest.mark.parametrize("optimizer", ["sgd", "adagrad", "rowwise_adagrad"])
def test_an_update_is_that_of_a_backward_pass_to_the_last_bit(optimizer: str) -> None:
    """Also where a place comes twice, and rows that were not touched stay as they are."""
    kernel = kernel_of(rows=9, optimizer=optimizer, eps=1e-3)
    replica = Replica.empty(kernel, 9)
    home = kernel.table.row_tensors()
    for own, other in zip(replica.tensors, home, strict=True):
        own.copy_(numbers(*own.shape).abs())
        other.copy_(own)
    before = [tensor.clone() for tensor in home]
    places = places_of(3, 8, 3, 0)
    for step in range(3):
        gradients = numbers(4, 4, seed=step)
        replica.update(places, gradients, replica.settings())
        kernel(places).backward(gradients)
    for own, other, old in zip(replica.tensors, home, before, strict=True):
        assert torch.equal(own, other)
        assert not torch.equal(own[[0, 3, 8]], old[[0, 3, 8]])
        assert torch.equal(own[[1, 2, 4, 5, 6, 7]], old[[1, 2, 4, 5, 6, 7]])


def test_an_update_has_the_settings_that_it_is_given() -> None:
    replica = replica_of(2)
    of_first_step = replica.settings()
    replica.kernel.table.set_learning_rate(2.0)
    ones = torch.ones(1, 4)
    replica.update(places_of(0), ones, of_first_step)
    replica.update(places_of(1), ones, replica.settings())
    assert replica.tensors[0][:, 0].tolist() == [-0.5, -2.0]
    replica.update(places_of(0), ones, of_first_step)
    assert replica.tensors[0][:, 0].tolist() == [-1.0, -2.0]


def test_settings_other_than_the_learning_rate_are_followed() -> None:
    replica = replica_of(1, optimizer="adagrad", eps=1.0)
    replica.update(places_of(0), torch.ones(1, 4), replica.settings())
    assert replica.tensors[0][0, 0].item() == pytest.approx(-0.5 / (1 + 1))
    replica.kernel.table.update_hyper_parameters({"eps": 3.0})
    replica.update(places_of(0), torch.ones(1, 4), replica.settings())
    assert replica.tensors[0][0, 0].item() == pytest.approx(-0.25 - 0.5 / (2**0.5 + 3))


def test_clipping_is_that_of_the_bucket() -> None:
    assert not replica_of(1).clips
    assert replica_of(1, gradient_clipping=True, max_gradient=1.0).clips


COUNTER: dict[str, Any] = {
    "weight_decay_mode": WeightDecayMode.COUNTER,
    "counter_based_regularization": CounterBasedRegularizationDefinition(),
}


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"frozen": True}, "the table has requires_grad False, must have True"),
        ({"optimizer": "rowwise_adagrad", **COUNTER}, "counts the steps of each row"),
    ],
    ids=["frozen", "counter"],
)
def test_replicas_that_would_not_stay_equal_are_refused(
    settings: dict[str, Any], problem: str
) -> None:
    with pytest.raises(ValueError, match=problem) as caught:
        check_replicable(kernel_of(**settings), "hot rows of a, b")
    assert str(caught.value).startswith("hot rows of a, b: ")


def test_optimizers_whose_step_counts_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = kernel_of()
    monkeypatch.setattr(kernel.table, "optimizer", EmbOptimType.ADAM)  # which is for CUDA only
    with pytest.raises(ValueError, match="optimizer is 'adam', must be one of"):
        check_replicable(kernel, "hot rows")


@pytest.mark.parametrize("optimizer", ["sgd", "adagrad", "rowwise_adagrad"])
def test_what_stays_equal_is_allowed(optimizer: str) -> None:
    """On CPU FBGEMM rounds fp16 to nearest, whatever it is told."""
    check_replicable(kernel_of(optimizer=optimizer, dtype="fp16", stochastic_rounding=True), "")


def test_rounding_at_random_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = kernel_of(dtype="fp16", stochastic_rounding=True)
    # As on CUDA, where the weights are elsewhere.
    monkeypatch.setattr(kernel.table, "weights_host", nn.Parameter(torch.empty(0)))
    with pytest.raises(ValueError, match="stochastic_rounding is True and weights are fp16"):
        check_replicable(kernel, "hot rows")
