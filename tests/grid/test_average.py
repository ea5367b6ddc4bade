"""Groups that train alone and are averaged: against whole models in plain torch."""

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

import fusedrec_torchrec as fr
from tests.case import Case, Table, sharded
from tests.cluster import Cluster
from tests.grid.reference import grid_run, groups_of
from tests.parity import local_parts, optimizer_states, train_step

TABLES = (
    Table("a", 50, dim=8, pooling="mean"),
    Table("b", 33, dim=16),
    Table("c", 7, dim=8),
    Table("d", 130, dim=4),
)
MIXED = tuple(
    dataclasses.replace(t, pooling="sum", sharding=sharding)
    for t, sharding in zip(
        TABLES, ("fused_row_wise", "table_wise", "row_wise", "column_wise"), strict=True
    )
)
STOCK = tuple(
    dataclasses.replace(t, pooling="sum", sharding=sharding)
    for t, sharding in zip(
        TABLES, ("table_wise", "table_wise", "row_wise", "row_wise"), strict=True
    )
)
LAYOUTS = ["replicas_adjacent", "groups_adjacent"]


def train(case: Case) -> None:
    """Trains on this rank and compares with the reference; outputs, weights, optimizer state."""
    run = grid_run(case)
    model = sharded(case)
    assert case.grid is not None
    group = next(
        g
        for g, ranks in enumerate(groups_of(case.grid, dist.get_world_size()))
        if dist.get_rank() in ranks
    )
    for step in range(case.steps):
        outputs = train_step(case, model, step)
        model.sync()
        for name, want in run.outputs[step][dist.get_rank()].items():
            torch.testing.assert_close(outputs[name], want, rtol=1e-5, atol=1e-5)
    state_dict, states = model.state_dict(), optimizer_states(model)
    for t in case.tables:
        value = state_dict[f"sparse.embedding_bags.{t.name}.weight"]
        for where, part in local_parts(value):
            torch.testing.assert_close(
                part, run.weights[group][t.name][where].detach(), rtol=1e-5, atol=1e-5
            )
        want_state = run.states[group][t.name]
        if want_state is not None and t.name in states:
            for where, part in local_parts(states[t.name]):
                want = want_state[where[: want_state.dim()]]
                torch.testing.assert_close(part.view_as(want), want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("world_size", "size"), [(2, 1), (4, 2), (4, 1)])
@pytest.mark.parametrize("optimizer", ["sgd", "adagrad", "rowwise_adagrad"])
def test_groups_train_as_whole_models_do(
    clusters: Callable[[int], Cluster], world_size: int, size: int, optimizer: str
) -> None:
    case = Case(
        tables=TABLES,
        batch_sizes=(6, 3, 5, 4)[:world_size],
        optimizer=optimizer,
        grid=fr.GridOptions(sharding_group_size=size),
    )
    clusters(world_size).run(train, case)


@pytest.mark.parametrize("tables", [MIXED, STOCK], ids=["mixed", "stock"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_stock_tables(cluster_4: Cluster, tables: tuple[Table, ...], layout: Any) -> None:
    case = Case(
        tables=tables,
        batch_sizes=(5, 5, 5, 5),  # stock row_wise on gloo cannot do others
        optimizer="rowwise_adagrad",
        grid=fr.GridOptions(sharding_group_size=2, layout=layout),
    )
    cluster_4.run(train, case)
