"""Modes of torch around a fused module: autocast, inference mode, gradients of gradients."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

import fusedrec_torchrec as fr
from fusedrec_torchrec.core import native
from tests.case import Case, Table, batch, coefficients, sharded
from tests.cluster import Cluster
from tests.parity import check, train_step
from tests.reference import unsharded_run

SUMS = (Table("a", 50, dim=16), Table("b", 9, dim=8))
TABLES = (Table("a", 50, dim=16), Table("b", 9, dim=8, pooling="mean"))


def weight_gradients(case: Case, autocast: bool, with_native: bool) -> torch.Tensor:
    """Gradients of the weights of ids; forward and backward inside of autocast or not."""
    with pytest.MonkeyPatch.context() as patch:
        if not with_native:
            patch.setattr(native, "available", lambda: False)
        model = sharded(case)
        given = batch(case, 0, dist.get_rank())
        weights = given.weights().clone().requires_grad_()
        features = KeyedJaggedTensor(
            given.keys(), given.values(), weights=weights, lengths=given.lengths()
        )
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
            outputs = model(features)
            parts = [
                (out * coefficients(case, 0, dist.get_rank(), name, out)).sum()
                for name, out in outputs.items()
            ]
            torch.stack(parts).sum().backward()
    assert weights.grad is not None
    return weights.grad


@pytest.mark.parametrize("with_native", [True, False], ids=["native", "torch"])
def test_autocast_does_not_round_gradients_of_weights(
    cluster_2: Cluster, with_native: bool
) -> None:
    case = Case(tables=TABLES, batch_sizes=(6, 4), weighted=True, integers=False)
    plain = cluster_2.run(weight_gradients, case, False, with_native)
    cast = cluster_2.run(weight_gradients, case, True, with_native)
    for one, other in zip(plain, cast, strict=True):
        assert one.abs().max() > 0
        assert torch.equal(one, other)


def second_order_error(case: Case) -> str:
    model = sharded(case)
    given = batch(case, 0, dist.get_rank())
    weights = given.weights().clone().requires_grad_()
    features = KeyedJaggedTensor(
        given.keys(), given.values(), weights=weights, lengths=given.lengths()
    )
    loss = torch.stack([(output**2).sum() for output in model(features).values()]).sum()
    (gradient,) = torch.autograd.grad(loss, weights, create_graph=True)
    try:
        gradient.sum().backward()
    except RuntimeError as error:
        return str(error)
    return "no error"


def test_gradients_of_gradients_are_refused(cluster_2: Cluster) -> None:
    case = Case(tables=TABLES, batch_sizes=(6, 4), weighted=True)
    for error in cluster_2.run(second_order_error, case):
        assert "second-order gradients through fused tables are not supported" in error


def create_graph_step(case: Case) -> None:
    """A graph of the backward pass, made for others, changes nothing in ours."""
    model, run = sharded(case), unsharded_run(case, dist.get_world_size())
    outputs = []
    for step in range(case.steps):
        found = model(batch(case, step, dist.get_rank()))
        parts = [
            (out * coefficients(case, step, dist.get_rank(), name, out)).sum()
            for name, out in found.items()
        ]
        torch.stack(parts).sum().backward(create_graph=True)
        outputs.append({name: out.detach() for name, out in found.items()})
    check(case, run, outputs, model)


def test_training_with_create_graph_is_that_without(cluster_2: Cluster) -> None:
    cluster_2.run(create_graph_step, Case(tables=TABLES, batch_sizes=(6, 4)))


def train_after_inference(case: Case) -> None:
    """The very first batch, and one in each step, are looked up in inference mode."""
    model, run = sharded(case), unsharded_run(case, dist.get_world_size())
    outputs = []
    for step in range(case.steps):
        with torch.inference_mode():
            seen = dict(model(batch(case, step, dist.get_rank())).items())
        outputs.append(train_step(case, model, step))
        for name, output in outputs[-1].items():
            assert torch.equal(seen[name], output), name
            assert not seen[name].requires_grad
    check(case, run, outputs, model)


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"weighted": True, "tables": SUMS},
        {"kind": "ec", "tables": (Table("a", 50), Table("b", 9))},
        {"kind": "fp_ebc", "tables": SUMS},
        {"tables": (TABLES[0], Table("c", 30, sharding="table_wise"))},
        {"tables": (Table("a", 50, dim=16, hot=(0, 1, 2)), TABLES[1])},
        {"input_dist": "exact_counts", "vbe": True},
    ],
    ids=["ebc", "weighted", "ec", "fp_ebc", "beside stock", "hot rows", "vbe"],
)
def test_inference_mode_before_and_between_training_steps(
    cluster_2: Cluster, settings: dict[str, Any]
) -> None:
    given = {"tables": TABLES, "batch_sizes": (6, 4), "optimizer": "rowwise_adagrad"} | settings
    cluster_2.run(train_after_inference, Case(**given))


def codec_step_after_inference() -> torch.Tensor:
    case = Case(tables=TABLES, batch_sizes=(6, 4))
    options = fr.ExchangeOptions(codecs=fr.Codecs(forward=fr.CodecOptions(type="bf16")))
    model = sharded(case, options=options)
    with torch.inference_mode():
        seen = dict(model(batch(case, 0, dist.get_rank())).items())
    trained = train_step(case, model, 0)
    return torch.stack([(seen[n] - out).abs().max() for n, out in trained.items()]).max()


def test_inference_mode_with_codecs(cluster_2: Cluster) -> None:
    assert cluster_2.run(codec_step_after_inference) == [0.0, 0.0]
