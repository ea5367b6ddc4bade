"""Tables that their owners pool: outputs, weights and state equal the unsharded module's."""

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from fusedrec_torchrec.core.collective_counter import CollectiveCounter
from tests.case import Case, Table, batch, sharded
from tests.cluster import Cluster
from tests.parity import check, optimizer_states, run_and_check, train_step, whole
from tests.reference import unsharded_run
from tests.sharding.modules.test_ebc_parity import (
    train_weighted_means,
    train_without_gradient_division,
)
from tests.sharding.modules.test_hash_ids import compare as hashing
from tests.sharding.modules.test_modes import train_after_inference
from tests.sharding.modules.test_without_native import run_without_native

MIX = (
    Table("a", 50, dim=8, pooling="mean", sharding="fused_table_wise"),
    Table("b", 33, dim=16),
    Table("c", 7, dim=8, sharding="fused_column_wise"),
    Table("d", 130, dim=4, pooling="mean", sharding="fused_table_wise"),
    Table("e", 60, dim=8),
    Table("f", 40, dim=16, pooling="mean", sharding="fused_column_wise"),
)
SUMS = tuple(dataclasses.replace(t, pooling="sum") for t in MIX)
WHOLE = tuple(
    dataclasses.replace(t, sharding="fused_table_wise") if t.sharding == "fused_column_wise" else t
    for t in MIX
)
BESIDE_STOCK = (
    *SUMS,
    Table("g", 20, dim=8, sharding="table_wise"),
    Table("h", 30, dim=8, sharding="row_wise", pooling="mean"),
    Table("i", 25, dim=8, sharding="column_wise"),
    Table("j", 15, dim=8, sharding="data_parallel"),
)


def only(sharding: str, tables: tuple[Table, ...] = MIX) -> tuple[Table, ...]:
    return tuple(dataclasses.replace(t, sharding=sharding) for t in tables)


@pytest.mark.parametrize(
    ("world_size", "integers"),
    [(1, True), (2, True), (4, True), (2, False), (3, False), (4, False)],
)
@pytest.mark.parametrize("optimizer", ["sgd", "adagrad"])
def test_a_mix_of_all_types_equals_unsharded_and_stock(
    clusters: Callable[[int], Cluster], world_size: int, optimizer: str, integers: bool
) -> None:
    case = Case(
        tables=MIX,
        batch_sizes=(6,) * world_size,
        optimizer=optimizer,
        integers=integers,
        repeated=True,
    )
    clusters(world_size).run(run_and_check, case, also_stock=world_size < 3)


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_row_wise_adagrad_of_whole_tables(
    clusters: Callable[[int], Cluster], world_size: int
) -> None:
    case = Case(tables=WHOLE, batch_sizes=(6,) * world_size, optimizer="rowwise_adagrad")
    clusters(world_size).run(run_and_check, case, also_stock=True)


TABLES_OF_TYPES = {
    "mix": MIX,
    "table_wise": only("fused_table_wise"),
    "column_wise": only("fused_column_wise"),
}
VARIANTS: dict[str, dict[str, Any]] = {
    "uneven batches": {"batch_sizes": (3, 9), "optimizer": "adagrad"},
    "uneven batches, exact counts": {"batch_sizes": (9, 2), "input_dist": "exact_counts"},
    "a rank without samples": {"batch_sizes": (0, 4)},
    "another rank without samples": {"batch_sizes": (4, 0), "optimizer": "adagrad"},
    "no samples": {"batch_sizes": (0, 0)},
    "no ids": {"lengths": (0,)},
    "one id each": {"lengths": (1,), "optimizer": "adagrad"},
    "one id or none": {"lengths": (0, 1), "repeated": True},
    "long bags": {"lengths": (32,), "repeated": True},
    "int32 ids": {"id_dtype": "int32", "optimizer": "adagrad"},
    "int64 lengths": {"length_dtype": "int64"},
    "int32 ids, int64 lengths, repeated": {
        "id_dtype": "int32",
        "length_dtype": "int64",
        "repeated": True,
        "integers": False,
    },
    "vbe": {"vbe": True, "optimizer": "adagrad"},
    "vbe, repeated": {"vbe": True, "repeated": True, "batch_sizes": (8, 7)},
    "vbe, a rank without samples": {"vbe": True, "batch_sizes": (0, 4)},
    "vbe, another rank without samples": {"vbe": True, "batch_sizes": (4, 0)},
    "vbe, no samples": {"vbe": True, "batch_sizes": (0, 0)},
    "fp16 outputs": {"output_dtype": "fp16", "repeated": True},
    "fp16 outputs, vbe": {"output_dtype": "fp16", "vbe": True},
}


@pytest.mark.parametrize(
    "tables",
    ["mix", *(pytest.param(k, marks=pytest.mark.slow) for k in TABLES_OF_TYPES if k != "mix")],
)
@pytest.mark.parametrize("variant", VARIANTS)
def test_all_kinds_of_batches(cluster_2: Cluster, tables: str, variant: str) -> None:
    settings = {"batch_sizes": (5, 4), **VARIANTS[variant]}
    cluster_2.run(run_and_check, Case(tables=TABLES_OF_TYPES[tables], **settings))


@pytest.mark.parametrize(
    "variant",
    [
        name if name in ("uneven batches", "vbe, repeated")
        else pytest.param(name, marks=pytest.mark.slow)
        for name in VARIANTS
    ],
)  # fmt: skip
@pytest.mark.parametrize("weighted", [False, True])
def test_without_native_operators(cluster_2: Cluster, variant: str, weighted: bool) -> None:
    settings = {"batch_sizes": (5, 4), "weighted": weighted, **VARIANTS[variant]}
    cluster_2.run(run_without_native, Case(tables=SUMS if weighted else MIX, **settings))


@pytest.mark.parametrize("lengths", [(1,), (0, 1, 2, 4)])
@pytest.mark.parametrize("repeated", [False, True])
def test_weighted(cluster_2: Cluster, lengths: tuple[int, ...], repeated: bool) -> None:
    case = Case(
        tables=SUMS,
        batch_sizes=(5, 4),
        weighted=True,
        lengths=lengths,
        repeated=repeated,
        optimizer="adagrad",
    )
    cluster_2.run(run_and_check, case, also_stock=True)


@pytest.mark.parametrize("kind", ["random", "vbe", "fp16", "stock"])
def test_other_weighted_modules(cluster_2: Cluster, kind: str) -> None:
    kinds: dict[str, dict[str, Any]] = {
        "random": {"integers": False},
        "vbe": {"vbe": True},
        "fp16": {"output_dtype": "fp16"},
        "stock": {
            "batch_sizes": (6, 6),
            "tables": tuple(dataclasses.replace(t, pooling="sum") for t in BESIDE_STOCK),
        },
    }
    settings = {"tables": SUMS, "batch_sizes": (6, 4), **kinds[kind]}
    cluster_2.run(run_and_check, Case(weighted=True, repeated=True, **settings))


@pytest.mark.parametrize("repeated", [False, True])
def test_weighted_means(cluster_2: Cluster, repeated: bool) -> None:
    case = Case(tables=MIX, batch_sizes=(5, 5), weighted=True, repeated=repeated)
    cluster_2.run(train_weighted_means, case)


@pytest.mark.parametrize("optimizer", ["sgd", "adagrad"])
def test_fp16_weights(cluster_2: Cluster, optimizer: str) -> None:
    tables = tuple(
        dataclasses.replace(t, dtype="fp16" if i % 2 else "fp32")
        for i, t in enumerate((*MIX, *(dataclasses.replace(t, name=f"{t.name}2") for t in MIX[1:])))
    )
    case = Case(tables=tables, batch_sizes=(5, 4), optimizer=optimizer, repeated=True)
    cluster_2.run(run_and_check, case)


SHARED_FEATURES = (
    Table("a", 20, features=("x", "y"), sharding="fused_table_wise"),
    Table("b", 30, features=("y", "z"), pooling="mean", sharding="fused_column_wise"),
    Table("c", 25, dim=16, features=("x", "z", "w"), sharding="fused_row_wise"),
    Table("d", 25, dim=16, features=("w", "x"), sharding="fused_column_wise"),
    Table("e", 9, features=("z", "x", "w"), sharding="fused_table_wise"),
)


@pytest.mark.parametrize("world_size", [2, pytest.param(4, marks=pytest.mark.slow)])
@pytest.mark.parametrize("vbe", [False, True])
def test_several_features_per_table_and_tables_per_feature(
    clusters: Callable[[int], Cluster], world_size: int, vbe: bool
) -> None:
    case = Case(
        tables=SHARED_FEATURES,
        batch_sizes=(4, 7, 5, 2)[:world_size],
        optimizer="adagrad",
        repeated=True,
        vbe=vbe,
    )
    clusters(world_size).run(run_and_check, case)


@pytest.mark.parametrize("vbe", [False, True])
@pytest.mark.parametrize("world_size", [2, 4])
def test_beside_stock_tables(
    clusters: Callable[[int], Cluster], world_size: int, vbe: bool
) -> None:
    tables = BESIDE_STOCK
    if vbe:  # which stock tables can on gloo only if they are table-wise
        tables = tuple(t for t in tables if t.sharding.startswith("fused") or t.name == "g")
    case = Case(tables=tables, batch_sizes=(6,) * world_size, vbe=vbe, repeated=True)
    clusters(world_size).run(run_and_check, case)


def test_gradient_division_can_be_off(cluster_2: Cluster) -> None:
    cluster_2.run(train_without_gradient_division, Case(tables=MIX, batch_sizes=(5, 5)))


def column_shards_as_stock(case: Case) -> None:
    """Row-wise optimizers have a number for each row of each shard."""
    ours, stock = sharded(case.only("fused_column_wise")), sharded(case.only("column_wise"))
    for step in range(case.steps):
        got, want = train_step(case, ours, step), train_step(case, stock, step)
        for name in want:
            assert torch.equal(got[name], want[name]), (step, name)
    for table in case.tables:
        got, want = (optimizer_states(model)[table.name] for model in (ours, stock))
        like = torch.zeros(want.size())
        assert got.size() == want.size()
        assert torch.equal(whole(got, like), whole(want, like))
        assert float(whole(got, like).sum()) > 0


@pytest.mark.parametrize("world_size", [2, 4])
def test_row_wise_adagrad_of_columns_is_that_of_stock_columns(
    clusters: Callable[[int], Cluster], world_size: int
) -> None:
    dim = 4 * world_size  # the test's stock tables have shards of four columns
    tables = tuple(
        Table(f"t{i}", rows, dim, pooling=("sum", "mean")[i % 2])
        for i, rows in enumerate((50, 7, 33))
    )
    case = Case(
        tables=tables,
        batch_sizes=(6,) * world_size,
        optimizer="rowwise_adagrad",
        repeated=True,
    )
    clusters(world_size).run(column_shards_as_stock, case)


def overflowing(case: Case) -> list[int]:
    """Batches that are much larger than those before; returns the collectives of each step."""
    world_size, rank = dist.get_world_size(), dist.get_rank()
    sizes = [4, 4, 400, 400, 4, 400]
    cases = [dataclasses.replace(case, batch_sizes=(s,) * world_size) for s in sizes]
    model, counts = sharded(case), []
    for step, sized in enumerate(cases):
        # The learning rate is 0: every step is compared with that of an unsharded module.
        want = unsharded_run(dataclasses.replace(sized, steps=1, seed=case.seed), world_size)
        with CollectiveCounter() as counter:
            got = train_step(sized, model, 0)
        counts.append(len(counter.collectives))
        for name, expected in want.outputs[0][rank].items():
            assert torch.equal(got[name], expected), (step, name)
    return counts


@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize("weighted", [False, True])
def test_batches_of_many_more_bags_take_one_round_more_once(
    clusters: Callable[[int], Cluster], world_size: int, weighted: bool
) -> None:
    case = Case(tables=SUMS, batch_sizes=(4,) * world_size, learning_rate=0.0, weighted=weighted)
    for counts in clusters(world_size).run(overflowing, case):
        assert counts == [4, 3, 4, 3, 3, 3]


def overflow_in_training(case: Case) -> None:
    """No room at all before each step: nothing is lost in two rounds."""
    run = unsharded_run(case, dist.get_world_size())
    model, outputs = sharded(case), []
    for step in range(case.steps):
        sparse = model.module.sparse
        sparse.fused.input_dist(sparse._input_dists).exchange.capacity.current = 64 * (step % 2)
        outputs.append(train_step(case, model, step))
    check(case, run, outputs, model)


def test_nothing_is_lost_if_every_step_overflows(cluster_2: Cluster) -> None:
    case = Case(tables=MIX, batch_sizes=(60, 50), integers=False, repeated=True)
    cluster_2.run(overflow_in_training, case)


@pytest.mark.parametrize("repeated", [False, True])
def test_hashing_inside_equals_hashing_outside(cluster_2: Cluster, repeated: bool) -> None:
    tables = (
        Table("a", 50, sharding="fused_table_wise"),
        Table("b", 33, sharding="fused_column_wise"),
    )
    case = Case(tables=tables, batch_sizes=(6, 4), repeated=repeated)
    cluster_2.run(hashing, case, 7)


FROZEN = (
    *MIX[:3],
    Table("x", 9, frozen=True, sharding="fused_table_wise"),
    Table("y", 9, dim=16, frozen=True, sharding="fused_column_wise"),
    Table("z", 9, frozen=True),
)


def test_frozen_tables_stay_and_others_train(cluster_2: Cluster) -> None:
    case = Case(tables=FROZEN, batch_sizes=(6, 4), optimizer="adagrad", repeated=True)
    cluster_2.run(run_and_check, case)


def outputs_need_gradients(case: Case) -> bool:
    return any(out.requires_grad for out in sharded(case)(batch(case, 0, dist.get_rank())).values())


def test_only_frozen_tables(cluster_2: Cluster) -> None:
    case = Case(tables=FROZEN[3:5], batch_sizes=(6, 4))
    assert cluster_2.run(outputs_need_gradients, case) == [False, False]


@pytest.mark.parametrize(
    "settings",
    [{}, {"weighted": True, "tables": SUMS}, {"input_dist": "exact_counts", "vbe": True}],
    ids=["ebc", "weighted", "vbe"],
)
def test_inference_mode_before_and_between_training_steps(
    cluster_2: Cluster, settings: dict[str, Any]
) -> None:
    given = {"tables": MIX, "batch_sizes": (6, 4), "optimizer": "adagrad"} | settings
    cluster_2.run(train_after_inference, Case(**given))


def evaluations_change_nothing(case: Case) -> None:
    """Steps between which the model is evaluated, in eval mode and without gradients."""
    run = unsharded_run(case, dist.get_world_size())
    model, outputs = sharded(case), []
    for step in range(case.steps):
        model.eval()
        with torch.no_grad():
            seen = model(batch(case, step, dist.get_rank()))
        model.train()
        outputs.append(train_step(case, model, step))
        for name, output in outputs[-1].items():
            assert torch.equal(seen[name], output) and not seen[name].requires_grad
    check(case, run, outputs, model)


def test_evaluations_between_steps_change_nothing(cluster_2: Cluster) -> None:
    case = Case(tables=MIX, batch_sizes=(6, 4), optimizer="adagrad", repeated=True)
    cluster_2.run(evaluations_change_nothing, case)
