"""Groups that train alone and are averaged: against whole models in plain torch."""

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

import fusedrec_torchrec as fr
from fusedrec_torchrec.core.collective_counter import CollectiveCounter
from fusedrec_torchrec.grid import touched
from tests.case import Case, Table, Wrapper, sharded, unsharded
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


@pytest.mark.parametrize("every", [pytest.param(2, marks=pytest.mark.slow), 3])
@pytest.mark.parametrize("states", [True, False])
def test_syncs_every_few_steps(cluster_4: Cluster, every: int, states: bool) -> None:
    case = Case(
        tables=TABLES,
        batch_sizes=(6, 3, 0, 4),
        optimizer="rowwise_adagrad",
        steps=7,  # the last sync is some steps ago
        grid=fr.GridOptions(sharding_group_size=2, sync_every=every, sync_optimizer_state=states),
    )
    cluster_4.run(train, case)


def bits(model: Any) -> list[torch.Tensor]:
    """Weights and optimizer state on this rank."""
    weights = [part.clone() for v in model.state_dict().values() for _, part in local_parts(v)]
    states = optimizer_states(model).values()
    return weights + [part.clone() for value in states for _, part in local_parts(value)]


def against_all_rows(case: Case) -> dict[str, Any]:
    """Averages of touched rows and of whole shards; the bytes of both."""
    assert case.grid is not None
    all_rows = dataclasses.replace(
        case, grid=dataclasses.replace(case.grid, rows="all", overlap="none")
    )
    models = sharded(case), sharded(all_rows)
    sent = [0, 0]
    for step in range(case.steps):
        for i, model in enumerate(models):
            train_step(case, model, step)
            with CollectiveCounter() as counter:
                model.sync()
            sent[i] += counter.bytes_sent()
        for got, want in zip(*map(bits, models), strict=True):
            assert torch.equal(got, want), step
    done = models[0].replicas.done
    return {"sent": sent, "sparse": done.sparse, "dense": done.dense, "rows": done.rows}


LARGE = tuple(dataclasses.replace(t, rows=40 * t.rows) for t in TABLES)


@pytest.mark.parametrize(
    "optimizer",
    [
        pytest.param("sgd", marks=pytest.mark.slow),
        pytest.param("adagrad", marks=pytest.mark.slow),
        "rowwise_adagrad",
    ],
)
@pytest.mark.parametrize("tables", [LARGE, MIXED], ids=["fused", "mixed"])
@pytest.mark.parametrize("every", [1, 3])
def test_touched_rows_are_enough(
    cluster_4: Cluster, optimizer: str, tables: tuple[Table, ...], every: int
) -> None:
    """Bit for bit: two replicas, whose sum does not depend on an order."""
    case = Case(
        tables=tables,
        batch_sizes=(5, 5, 5, 5),
        optimizer=optimizer,
        integers=False,
        grid=fr.GridOptions(sharding_group_size=2, sync_every=every),
    )
    for found in cluster_4.run(against_all_rows, case):
        if tables is LARGE:
            assert found["dense"] == 0 and found["sparse"] > 0
            assert found["sent"][0] < found["sent"][1] / 4


def test_whole_shards_where_they_are_fewer_bytes(cluster_4: Cluster) -> None:
    tables = (Table("a", 12, dim=8), Table("b", 8, dim=16))
    case = Case(
        tables=tables,
        batch_sizes=(30, 30, 30, 30),
        grid=fr.GridOptions(sharding_group_size=2),
    )
    for found in cluster_4.run(against_all_rows, case):
        assert found["sparse"] == 0 and found["dense"] == case.steps
        # What it takes to find out: a number for each bucket.
        assert found["sent"][0] <= found["sent"][1] + case.steps * 2 * 4


def bytes_of_a_sync(case: Case) -> tuple[int, int, list[str]]:
    """Of this rank, in the steady state, and what they should be."""
    model = sharded(case)
    for step in range(3):
        train_step(case, model, step)
        model.sync()
    rows = model.replicas.done.rows
    train_step(case, model, 0)  # as many rows as before
    with CollectiveCounter() as counter:
        model.sync()
    rows = model.replicas.done.rows - rows
    capacity = model.replicas._average._capacity.current
    # Two replicas: numbers to the other one, half of the rows each way.
    want = 4 * (1 + capacity) + rows * (8 + 1) * 4
    return counter.bytes_sent(), want, [c.name for c in counter.collectives]


def test_the_bytes_of_a_sync(cluster_4: Cluster) -> None:
    case = Case(
        tables=(Table("a", 5000, dim=8),),
        batch_sizes=(5, 5, 5, 5),
        optimizer="rowwise_adagrad",
        grid=fr.GridOptions(sharding_group_size=2),
    )
    for got, want, names in cluster_4.run(bytes_of_a_sync, case):
        assert got == want
        assert names == ["all_gather", "all_reduce"]


def overlapped(case: Case) -> None:
    """A sync until the next lookup has the same result as one that is waited for."""
    assert case.grid is not None
    waited = dataclasses.replace(case, grid=dataclasses.replace(case.grid, overlap="none"))
    models = sharded(case), sharded(waited)
    for step in range(case.steps):
        outputs = []
        for model in models:
            outputs.append(train_step(case, model, step))
            model.sync()
        assert models[0].replicas._average.under_way
        for name in outputs[0]:
            assert torch.equal(outputs[0][name], outputs[1][name])
        if step % 2:  # a look at the state ends it, too
            for got, want in zip(*map(bits, models), strict=True):
                assert torch.equal(got, want)
        elif step == 2:  # at the optimizer's state alone
            states = [optimizer_states(model) for model in models]
            for name in states[0]:
                for (_, got), (_, want) in zip(
                    *(local_parts(each[name]) for each in states), strict=True
                ):
                    assert torch.equal(got, want)
        elif step == 4:  # through an inner module
            states = [model.module.state_dict() for model in models]
            for name in states[0]:
                for (_, got), (_, want) in zip(
                    *(local_parts(each[name]) for each in states), strict=True
                ):
                    assert torch.equal(got, want)


@pytest.mark.parametrize("tables", [LARGE, MIXED, TABLES], ids=["fused", "mixed", "dense"])
def test_overlap_until_the_next_lookup(cluster_4: Cluster, tables: tuple[Table, ...]) -> None:
    case = Case(
        tables=tables,
        batch_sizes=(5, 5, 5, 5),
        optimizer="rowwise_adagrad",
        grid=fr.GridOptions(sharding_group_size=2, overlap="until_lookup"),
    )
    cluster_4.run(overlapped, case)


def one_step_late(case: Case) -> None:
    """SGD and a linear loss: gradients do not depend on weights, so updates add up.

    After a step without updates and one more sync, replicas are equal, and what they would be
    without any delay.
    """
    assert case.grid is not None
    waited = dataclasses.replace(case, grid=dataclasses.replace(case.grid, overlap="none"))
    model, other = sharded(case), sharded(waited)
    late = False
    for step in range(case.steps):
        for each in (model, other):
            train_step(case, each, step)
            each.sync()
        late |= any(not torch.equal(a, b) for a, b in zip(raw(model), raw(other), strict=True))
    assert late
    for each in (model, other):
        each.sync_now()
        each.sync_now()
    for got, want in zip(bits(model), bits(other), strict=True):
        torch.testing.assert_close(got, want, rtol=0, atol=0)
    equal_replicas(model)


def raw(model: Any) -> list[torch.Tensor]:
    """Weights as they are, with a sync under way."""
    return [block.tensors[0].clone() for table in model.replicas._tables for block in table.blocks]


@pytest.mark.parametrize("tables", [LARGE, TABLES], ids=["sparse", "dense"])
@pytest.mark.parametrize("every", [1, 2])
def test_one_step_late(cluster_4: Cluster, tables: tuple[Table, ...], every: int) -> None:
    case = Case(
        tables=tuple(dataclasses.replace(t, pooling="sum") for t in tables),
        batch_sizes=(5, 5, 5, 5),
        learning_rate=2.0,  # so that halves and quarters of integers are exact
        grid=fr.GridOptions(sharding_group_size=2, overlap="one_step", sync_every=every),
    )
    cluster_4.run(one_step_late, case)


def lands_after_one_step(case: Case) -> list[bool]:
    model: Any = sharded(case)
    under_way = []
    for step in range(7):
        train_step(case, model, step)
        model.sync()
        under_way.append(model.replicas._average.under_way)
    return under_way


def test_one_step_late_is_one_step_late(cluster_4: Cluster) -> None:
    case = Case(
        tables=LARGE,
        batch_sizes=(5, 5, 5, 5),
        grid=fr.GridOptions(sharding_group_size=2, overlap="one_step", sync_every=3),
    )
    assert cluster_4.run(lands_after_one_step, case)[0] == [False, False, True] * 2 + [False]


def equal_replicas(model: Any) -> None:
    pg = model._groups.replica_pg
    for mine in bits(model):
        everywhere = [torch.empty_like(mine) for _ in range(pg.size())]
        dist.all_gather(everywhere, mine.contiguous(), group=pg)
        assert all(torch.equal(mine, theirs) for theirs in everywhere)


def begin(case: Case) -> None:
    """Replicas begin equal, though each rank draws its own weights."""
    torch.manual_seed(dist.get_rank())
    module = unsharded(case)
    model = fr.GridModelParallel(Wrapper(module), case.grid)  # type: ignore[arg-type]
    values = bits(model)
    assert any(float(value.abs().sum()) > 0 for value in values)
    equal_replicas(model)


@pytest.mark.parametrize("sync", ["weights", "gradients"])
def test_replicas_begin_equal(cluster_4: Cluster, sync: Any) -> None:
    grid = fr.GridOptions(sharding_group_size=2, sync=sync)
    cluster_4.run(begin, Case(tables=TABLES, batch_sizes=(5,) * 4, grid=grid))


def load_a_part(case: Case, loaded: str) -> None:
    """In the middle of two syncs; afterwards a sync makes all replicas equal, all of them."""
    model: Any = sharded(case)
    state = model.state_dict()
    names = [k for k in state if loaded == "weights" or k.endswith("a.weight")]
    ones = {k: torch.ones(state[k].shape) for k in names}
    for step in range(2):
        train_step(case, model, step)
        model.sync()
    model.load_state_dict(ones, strict=False)
    model.sync_now()
    equal_replicas(model)


@pytest.mark.parametrize("loaded", ["one table", "weights"])
def test_a_load_of_a_part_does_not_keep_groups_apart(cluster_4: Cluster, loaded: str) -> None:
    case = Case(
        tables=LARGE,
        batch_sizes=(5, 5, 5, 5),
        optimizer="rowwise_adagrad",
        grid=fr.GridOptions(sharding_group_size=2, sync_every=5),
    )
    cluster_4.run(load_a_part, case, loaded)


@pytest.mark.parametrize("kind", ["vbe", "ec", "weighted", "fp16", "data_parallel"])
def test_other_modules(cluster_4: Cluster, kind: str) -> None:
    """Touched rows against whole shards, and equal replicas."""
    sums = tuple(dataclasses.replace(t, pooling="sum", dim=8) for t in LARGE)
    stock = tuple(dataclasses.replace(t, sharding="table_wise") for t in sums[2:])
    kinds: dict[str, dict[str, Any]] = {
        "vbe": {"vbe": True, "tables": sums[:2] + stock},
        "ec": {"kind": "ec", "tables": sums[:2] + stock},
        "weighted": {"weighted": True, "tables": sums[:2] + stock},
        "fp16": {"tables": tuple(dataclasses.replace(t, dtype="fp16") for t in sums[:2] + stock)},
        "data_parallel": {
            "tables": (*sums[:3], dataclasses.replace(sums[3], sharding="data_parallel"))
        },
    }
    case = Case(
        tables=LARGE,
        batch_sizes=(5, 5, 5, 5),
        optimizer="rowwise_adagrad",
        grid=fr.GridOptions(sharding_group_size=2),
    )
    cluster_4.run(against_all_rows, dataclasses.replace(case, **kinds[kind]))


def many_rows(case: Case) -> None:
    """More row numbers than are kept as a list: a flag for each row."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(touched, "LEAST_KEPT", 3)
        against_all_rows(case)


@pytest.mark.parametrize("every", [1, 3])
def test_many_touched_rows(cluster_4: Cluster, every: int) -> None:
    small = tuple(dataclasses.replace(t, rows=8) for t in TABLES)
    case = Case(
        tables=(LARGE[0], *small[1:]),
        batch_sizes=(5, 5, 5, 5),
        optimizer="rowwise_adagrad",
        grid=fr.GridOptions(sharding_group_size=2, sync_every=every),
    )
    cluster_4.run(many_rows, case)
