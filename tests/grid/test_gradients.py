"""Groups that share gradients: training without groups, as exact as any two shardings are."""

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

import fusedrec_torchrec as fr
from tests.case import Case, Table, sharded
from tests.cluster import Cluster
from tests.grid.test_average import STOCK
from tests.parity import check, train_step
from tests.reference import unsharded_run

TABLES = (
    Table("a", 50, dim=8, pooling="mean"),
    Table("b", 33, dim=16),
    Table("c", 7, dim=8),
    Table("d", 130, dim=4),
)


def case_of(size: int, ranks: int, **kwargs: Any) -> Case:
    grid = fr.GridOptions(
        sharding_group_size=size, sync="gradients", layout=kwargs.pop("layout", "replicas_adjacent")
    )
    return Case(tables=TABLES, batch_sizes=(6, 3, 0, 5)[:ranks], grid=grid, **kwargs)


def train_and_compare(case: Case) -> None:
    """Against the unsharded run over all ranks' batches."""
    run = unsharded_run(case, dist.get_world_size())
    model = sharded(case)
    outputs = []
    for step in range(case.steps):
        outputs.append(train_step(case, model, step))
        model.sync()
    check(case, run, outputs, model)


@pytest.mark.parametrize(("ranks", "size"), [(2, 1), (4, 2), (4, 1)])
@pytest.mark.parametrize(
    "optimizer",
    ["sgd", pytest.param("adagrad", marks=pytest.mark.slow), "rowwise_adagrad"],
)
@pytest.mark.parametrize("integers", [True, False], ids=["exact", "random"])
def test_training_equals_training_without_groups(
    clusters: Callable[[int], Cluster], ranks: int, size: int, optimizer: str, integers: bool
) -> None:
    case = case_of(size, ranks, optimizer=optimizer, integers=integers)
    clusters(ranks).run(train_and_compare, case)


@pytest.mark.parametrize("kind", ["ec", "weighted", "vbe", "groups adjacent"])
def test_other_modules(cluster_4: Cluster, kind: str) -> None:
    sums = tuple(dataclasses.replace(t, pooling="sum", dim=8) for t in TABLES)
    kinds: dict[str, dict[str, Any]] = {
        "ec": {"kind": "ec", "tables": sums},
        "weighted": {"weighted": True, "tables": sums},
        "vbe": {"vbe": True, "batch_sizes": (6, 3, 4, 5)},
        "groups adjacent": {},
    }
    layout = "groups_adjacent" if kind == "groups adjacent" else "replicas_adjacent"
    case = case_of(2, 4, optimizer="rowwise_adagrad", layout=layout)
    cluster_4.run(train_and_compare, dataclasses.replace(case, **kinds[kind]))


def train_with_settings(case: Case, rates: tuple[float, ...]) -> None:
    """Learning rates that change from step to step, and clipped gradients; against 1D."""
    plain_case = dataclasses.replace(case, grid=None)
    models = sharded(case), sharded(plain_case)
    for step, rate in enumerate(rates):
        outputs = []
        for model in models:
            optimizer = model.fused_optimizer
            for group in optimizer.param_groups:
                group["lr"] = rate
            outputs.append(train_step(case, model, step, optimizer))
        for name in outputs[0]:
            torch.testing.assert_close(outputs[0][name], outputs[1][name], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("clipped", [False, True])
def test_learning_rates_of_the_step_they_belong_to(cluster_4: Cluster, clipped: bool) -> None:
    settings = (("gradient_clipping", True), ("max_gradient", 0.5)) if clipped else ()
    case = case_of(2, 4, optimizer="rowwise_adagrad", settings=settings)
    cluster_4.run(train_with_settings, case, (0.5, 0.5, 0.25, 0.25, 0.0, 1.0))


def refused(case: Case) -> str:
    with pytest.raises(ValueError, match="gradients") as error:
        sharded(case)
    return str(error.value)


def test_stock_tables_are_refused(cluster_4: Cluster) -> None:
    case = dataclasses.replace(case_of(2, 4), tables=STOCK)
    texts = cluster_4.run(refused, case)
    assert all("use sync 'weights'" in text for text in texts)
