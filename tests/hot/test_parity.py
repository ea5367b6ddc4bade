"""Training with hot rows equals training without: outputs, weights, optimizer state."""

import dataclasses
from collections.abc import Callable

import pytest

from tests.case import Case, Table
from tests.cluster import Cluster
from tests.hot.replicas import train_and_compare
from tests.parity import run_and_check

OPTIMIZERS = ["sgd", "adagrad", "rowwise_adagrad"]
# Low ids are the frequent ones.
MIXED_DIMS = (
    Table("a", 50, dim=8, pooling="mean", hot=(0, 1, 2, 25, 49)),
    Table("b", 33, dim=16, hot=(0, 17)),
    Table("c", 7, dim=8, hot=(0, 1, 2, 3, 4, 5, 6)),
    Table("d", 130, dim=4, pooling="mean"),
    Table("e", 40, dim=8),
)


@pytest.mark.parametrize("world_size", [1, 2, 4])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("integers", [True, False], ids=["exact", "random"])
def test_training_equals_training_without_hot_rows(
    clusters: Callable[[int], Cluster], world_size: int, optimizer: str, integers: bool
) -> None:
    case = Case(
        tables=MIXED_DIMS, batch_sizes=(6,) * world_size, optimizer=optimizer, integers=integers
    )
    clusters(world_size).run(train_and_compare, case)


@pytest.mark.parametrize("input_dist", ["single_shot", "exact_counts"])
def test_uneven_batches(cluster_4: Cluster, input_dist: str) -> None:
    case = Case(
        tables=MIXED_DIMS,
        batch_sizes=(3, 9, 0, 5),
        optimizer="rowwise_adagrad",
        input_dist=input_dist,
    )
    cluster_4.run(train_and_compare, case)


def test_one_id_per_bag(cluster_2: Cluster) -> None:
    case = Case(tables=MIXED_DIMS, batch_sizes=(5, 4), lengths=(1,), optimizer="adagrad")
    cluster_2.run(train_and_compare, case)


def test_weighted(cluster_2: Cluster) -> None:
    tables = tuple(dataclasses.replace(t, pooling="sum") for t in MIXED_DIMS)
    case = Case(tables=tables, batch_sizes=(5, 4), weighted=True, optimizer="rowwise_adagrad")
    cluster_2.run(train_and_compare, case)


def test_variable_batch_per_feature(cluster_2: Cluster) -> None:
    case = Case(tables=MIXED_DIMS, batch_sizes=(5, 4), vbe=True, optimizer="rowwise_adagrad")
    cluster_2.run(train_and_compare, case)


@pytest.mark.parametrize("vbe", [False, True])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_sequences(cluster_2: Cluster, optimizer: str, vbe: bool) -> None:
    tables = (Table("a", 50, hot=(0, 1, 2, 30)), Table("b", 33), Table("c", 7, hot=(0, 6)))
    case = Case(tables=tables, batch_sizes=(5, 4), kind="ec", optimizer=optimizer, vbe=vbe)
    cluster_2.run(train_and_compare, case)


def test_feature_processors(cluster_2: Cluster) -> None:
    tables = (Table("a", 50, hot=(0, 1, 2, 30)), Table("b", 33, hot=(5,)))
    cluster_2.run(run_and_check, Case(tables=tables, batch_sizes=(5, 4), kind="fp_ebc"))


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_fp16_weights(cluster_2: Cluster, optimizer: str) -> None:
    tables = (
        Table("a", 50, dtype="fp16", hot=(0, 1, 2, 30)),
        Table("b", 20, hot=(0,)),
        Table("c", 9, dtype="fp16"),
    )
    cluster_2.run(train_and_compare, Case(tables=tables, batch_sizes=(5, 4), optimizer=optimizer))


def test_fp16_outputs(cluster_2: Cluster) -> None:
    case = Case(tables=MIXED_DIMS, batch_sizes=(5, 4), output_dtype="fp16")
    cluster_2.run(train_and_compare, case)


def test_beside_stock_tables(cluster_2: Cluster) -> None:
    tables = (
        Table("a", 50, hot=(0, 1, 2, 30)),
        Table("b", 33, sharding="table_wise"),
        Table("c", 20, sharding="row_wise"),
    )
    cluster_2.run(run_and_check, Case(tables=tables, batch_sizes=(5, 5), optimizer="adagrad"))


def test_all_rows_hot(cluster_2: Cluster) -> None:
    tables = tuple(Table(n, 7, dim=d, hot=tuple(range(7))) for n, d in (("a", 8), ("b", 16)))
    cluster_2.run(train_and_compare, Case(tables=tables, batch_sizes=(6, 6)))
