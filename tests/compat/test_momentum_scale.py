"""Momentum-scaled row-wise AdaGrad on FBGEMM's tables, against plain torch."""

import copy
import dataclasses
import math
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from fbgemm_gpu.split_table_batched_embeddings_ops_training import WeightDecayMode
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.sharding_plan import construct_module_sharding_plan, row_wise, table_wise
from torchrec.distributed.types import ShardingPlan
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward

import fusedrec_torchrec as fr
from fusedrec_torchrec.compat.momentum_scale import ScaledEps, resolve_fused_params
from tests.case import (
    Case,
    Table,
    Wrapper,
    batch,
    coefficients,
    initial_weight,
    parallel,
    unsharded,
)
from tests.cluster import Cluster
from tests.parity import local_parts, optimizer_states, train_step

TABLES = (
    Table("a", 30, dim=8),
    Table("b", 20, dim=16),
    Table("c", 25, dim=8, sharding="table_wise"),
    Table("d", 12, dim=4, sharding="row_wise"),
)
CASE = Case(tables=TABLES, batch_sizes=(5, 5), integers=False, steps=6, eps=1e-3)
RATES = (0.5, 0.5, 0.25, 0.0, 1.0, 0.1)
Step = Callable[[float, torch.Tensor, float, float], torch.Tensor]


def ours(lr: float, v: torch.Tensor, c: float, eps: float) -> torch.Tensor:
    return lr / ((v / c).sqrt() + eps)


def papers(lr: float, v: torch.Tensor, c: float, eps: float) -> torch.Tensor:
    return lr / (v / c + eps).sqrt()


def reference(
    case: Case, ranks: int, c: float, formula: Step
) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Weights and sums of squares after the last step, of all tables."""
    module = unsharded(case, "cpu")
    weights = {t.name: w for t, w in zip(case.tables, module.parameters(), strict=True)}
    v = {t.name: torch.zeros(t.rows) for t in case.tables}
    with torch.no_grad():
        for i, t in enumerate(case.tables):
            weights[t.name].copy_(initial_weight(case, i))
    for step in range(case.steps):
        module.zero_grad()
        for rank in range(ranks):
            outputs = module(batch(case, step, rank)).to_dict()
            for name, out in outputs.items():
                loss = (out * coefficients(case, step, rank, name, out)).sum() / ranks
                loss.backward(retain_graph=True)
        with torch.no_grad():
            for name, weight in weights.items():
                gradient = weight.grad
                assert gradient is not None
                used = gradient.abs().sum(1) > 0
                v[name] += torch.where(used, (gradient**2).mean(1), 0)
                scale = formula(RATES[step], v[name], c, case.eps)[:, None]
                weight.sub_(torch.where(used[:, None], scale * gradient, 0))
    return {name: w.detach() for name, w in weights.items()}, v


def settings(c: float | None, **more: Any) -> dict[str, Any]:
    named = {} if c is None else {"momentum_scale": c}
    return {"learning_rate": 0.5, "eps": CASE.eps, **named, **more}


def build(case: Case, how: str, given: dict[str, Any], sharders: str = "fused") -> Any:
    module = unsharded(case)
    if how == "fused_params":
        params: dict[str, Any] = {"optimizer": fr.MomentumScaledRowWiseAdagrad, **given}
    else:
        params = {"optimizer": EmbOptimType.EXACT_SGD}
        given = {"lr": given.pop("learning_rate"), **given}
        apply_optimizer_in_backward(
            fr.MomentumScaledRowWiseAdagrad, module.parameters(), dict(given)
        )
    all_sharders: list[Any] = (
        fr.fused_sharders(fused_params=params)
        if sharders == "fused"
        else [EmbeddingBagCollectionSharder(fused_params=params)]
    )
    ranks = case.grid.sharding_group_size if case.grid else dist.get_world_size()
    generators = {
        "fused_row_wise": lambda i: fr.fused_row_wise(),
        "table_wise": lambda i: table_wise(rank=i % ranks, compute_kernel="fused"),
        "row_wise": lambda i: row_wise(compute_kernel="fused"),
    }
    plan = construct_module_sharding_plan(
        module,
        {t.name: generators[t.sharding](i) for i, t in enumerate(case.tables)},
        sharder=all_sharders[0],
        local_size=ranks,
        world_size=ranks,
        device_type="cpu",
    )
    model = parallel(Wrapper(module), ShardingPlan({"sparse": plan}), all_sharders, grid=case.grid)
    model.load_state_dict(
        {
            f"sparse.embedding_bags.{t.name}.weight": initial_weight(case, i)
            for i, t in enumerate(case.tables)
        },
        strict=False,
    )
    return model


def train(case: Case, model: Any) -> None:
    optimizer = model.fused_optimizer
    for group in optimizer.param_groups:
        assert group["lr"] == pytest.approx(0.5)  # the user's, not FBGEMM's
    for step, rate in enumerate(RATES):
        for group in optimizer.param_groups:
            group["lr"] = rate
        train_step(case, model, step, optimizer)


def compare(
    case: Case,
    model: Any,
    want: tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]],
    rtol: float,
) -> None:
    state_dict, states = model.state_dict(), optimizer_states(model)
    for t in case.tables:
        for where, part in local_parts(state_dict[f"sparse.embedding_bags.{t.name}.weight"]):
            torch.testing.assert_close(part, want[0][t.name][where], rtol=rtol, atol=rtol)
        if t.name in states:
            for where, part in local_parts(states[t.name]):
                v = want[1][t.name][where[:1]]
                torch.testing.assert_close(part.view_as(v), v, rtol=rtol, atol=rtol)


def train_and_compare(case: Case, how: str, c: float) -> None:
    model = build(case, how, settings(c))
    train(case, model)
    compare(case, model, reference(case, dist.get_world_size(), c, ours), 1e-5)


@pytest.mark.parametrize("how", ["fused_params", "apply_optimizer_in_backward"])
@pytest.mark.parametrize("c", [1.0, 2.0, 9.0])
def test_fused_and_stock_tables(cluster_2: Cluster, how: str, c: float) -> None:
    cluster_2.run(train_and_compare, CASE, how, c)


def with_hot_rows(case: Case) -> None:
    """Replicas of hot rows are tables of their own, with the same scale."""
    options = fr.HotOptions(tables={"a": fr.HotRule(ids=[0, 1, 2, 3])})
    module = unsharded(case)
    sharder = fr.FusedEmbeddingBagCollectionSharder(
        {"optimizer": fr.MomentumScaledRowWiseAdagrad, **settings(4.0)}, hot=options
    )
    plan = construct_module_sharding_plan(
        module, {"a": fr.fused_row_wise()}, sharder=sharder, device_type="cpu"
    )
    model = parallel(Wrapper(module), ShardingPlan({"sparse": plan}), [sharder])
    model.load_state_dict({"sparse.embedding_bags.a.weight": initial_weight(case, 0)})
    train(case, model)
    compare(case, model, reference(case, dist.get_world_size(), 4.0, ours), 1e-5)


def test_hot_rows(cluster_2: Cluster) -> None:
    cluster_2.run(with_hot_rows, dataclasses.replace(CASE, tables=TABLES[:1]))


def papers_formula(case: Case) -> None:
    """The same without eps; with eps the paper's steps are smaller where v / c is small."""
    exact = dataclasses.replace(case, eps=0.0)
    model = build(exact, "fused_params", settings(4.0, eps=0.0))
    train(exact, model)
    compare(exact, model, reference(exact, dist.get_world_size(), 4.0, papers), 1e-5)
    small = torch.tensor([1e-6, 1.0, 1e4])
    difference = ours(1.0, small, 4.0, 1e-8) / papers(1.0, small, 4.0, 1e-8)
    # sqrt(v / c + eps) = sqrt(v / c) sqrt(1 + eps c / v)
    torch.testing.assert_close(difference, (1 + 4e-8 / small).sqrt(), rtol=1e-4, atol=0.0)


def test_the_papers_formula(cluster_2: Cluster) -> None:
    cluster_2.run(papers_formula, CASE)


def fbgemm_step(
    params: dict[str, Any], weight: torch.Tensor, gradient: torch.Tensor, v: torch.Tensor
) -> None:
    """FBGEMM's row-wise AdaGrad as its CUDA kernels have it; those for CPU ignore weight decay."""
    rate, decay, mode = params["learning_rate"], params["weight_decay"], params["weight_decay_mode"]
    if mode == WeightDecayMode.L2:
        gradient = gradient + decay * weight
    v += (gradient**2).mean(1)
    if mode == WeightDecayMode.DECOUPLE:
        weight *= 1 - rate * decay
    weight -= (rate / (v.sqrt() + params["eps"]))[:, None] * gradient


@pytest.mark.parametrize("mode", [WeightDecayMode.L2, WeightDecayMode.DECOUPLE])
def test_weight_decay_is_what_the_user_asked_for(mode: WeightDecayMode) -> None:
    given = settings(4.0, weight_decay=0.1, weight_decay_mode=mode)
    params = resolve_fused_params({"optimizer": fr.MomentumScaledRowWiseAdagrad, **given}, 1)
    assert params is not None and params["optimizer"] == EmbOptimType.EXACT_ROWWISE_ADAGRAD
    assert "momentum_scale" not in params
    weight, v = torch.ones(3, 4), torch.zeros(3)
    wanted, wanted_v = torch.ones(3, 4), torch.zeros(3)
    for step in range(4):
        gradient = torch.arange(12.0).view(3, 4) + step
        fbgemm_step(params, weight, gradient, v)
        shrink = 0.5 * 0.1 if mode == WeightDecayMode.DECOUPLE else 0.0
        total = gradient + (0.1 * wanted if mode == WeightDecayMode.L2 else 0.0)
        wanted_v += (total**2).mean(1)
        wanted = wanted * (1 - shrink) - ours(0.5, wanted_v, 4.0, CASE.eps)[:, None] * total
        torch.testing.assert_close(weight, wanted)
        torch.testing.assert_close(v, wanted_v)


def test_decays_that_count_are_refused() -> None:
    given = settings(4.0, weight_decay_mode=WeightDecayMode.COUNTER)
    with pytest.raises(ValueError, match="weight_decay_mode is COUNTER"):
        resolve_fused_params({"optimizer": fr.MomentumScaledRowWiseAdagrad, **given}, 1)


def groups_scale(case: Case, sharders: str) -> None:
    """c is the number of groups, unless it is given."""
    model = build(case, "fused_params", settings(None), sharders)
    model.train()
    scales = {
        float(kernel._emb_module.optimizer_args.eps.momentum_scale)
        for lookup in model.module.sparse._lookups
        for kernel in lookup._emb_modules
    }
    assert scales <= {2.0}
    train(case, model)
    assert model.fused_optimizer.param_groups[0]["lr"] == RATES[-1]


def without_groups(case: Case) -> None:
    """With shared gradients v is that of one group, so nothing is to be scaled."""
    model = build(case, "fused_params", settings(None))
    for kernel in model.module.sparse._lookups[0]._emb_modules:
        assert kernel._emb_module.optimizer_args.eps.momentum_scale == 1.0
        table = kernel._emb_module
        table.update_hyper_parameters({"lr": 0.125, "eps": 0.5})
        assert table.get_learning_rate() == 0.125 and table.optimizer_args.eps == 0.5


def test_shared_gradients_are_not_scaled(cluster_4: Cluster) -> None:
    case = dataclasses.replace(
        CASE,
        tables=TABLES[:2],
        batch_sizes=(4,) * 4,
        grid=fr.GridOptions(sharding_group_size=2, sync="gradients"),
    )
    cluster_4.run(without_groups, case)


def new_settings(case: Case) -> None:
    """What a user sets later is scaled, too."""
    model = build(case, "fused_params", settings(4.0))
    for lookup in model.module.sparse._lookups:
        for kernel in lookup._emb_modules:
            table = kernel._emb_module
            table.update_hyper_parameters({"lr": 0.125, "eps": 0.25})
            assert table.get_learning_rate() == 0.125
            assert float(table.learning_rate_tensor) == 0.25
            assert table.optimizer_args.eps == 0.5


def test_settings_that_change_later(cluster_2: Cluster) -> None:
    cluster_2.run(new_settings, CASE)


@pytest.mark.parametrize("sharders", ["fused", "stock"])
def test_the_number_of_groups_is_the_default(cluster_4: Cluster, sharders: str) -> None:
    tables = TABLES if sharders == "fused" else TABLES[2:]
    case = dataclasses.replace(
        CASE, tables=tables, batch_sizes=(4,) * 4, grid=fr.GridOptions(sharding_group_size=2)
    )
    cluster_4.run(groups_scale, case, sharders)


def test_plain_torch() -> None:
    weight = torch.nn.Parameter(torch.ones(3, 4))
    optimizer = fr.MomentumScaledRowWiseAdagrad([weight], lr=0.5, eps=0.125, momentum_scale=4)
    weight.grad = torch.full((3, 4), 2.0)
    optimizer.step()
    want = 1 - 0.5 / (math.sqrt(4.0 / 4) + 0.125) * 2.0
    torch.testing.assert_close(weight.data, torch.full((3, 4), want))
    assert optimizer.param_groups[0]["lr"] == 0.5


@pytest.mark.parametrize("scale", [0, -1, math.inf, "2"])
def test_scales_that_make_no_sense(scale: Any) -> None:
    weight = torch.nn.Parameter(torch.ones(3, 4))
    with pytest.raises(ValueError, match=r"momentum_scale is .*, must be a number greater than 0"):
        fr.MomentumScaledRowWiseAdagrad([weight], momentum_scale=scale)


def test_a_scaled_eps_is_copied_whole() -> None:
    eps = ScaledEps(0.25, 4.0)
    for other in (copy.deepcopy(eps), pickle.loads(pickle.dumps(eps))):
        assert other == 0.5 and other.momentum_scale == 4.0
