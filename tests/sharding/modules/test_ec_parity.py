"""EmbeddingCollection: sequences, weights and optimizer state equal the unsharded module's."""

from collections.abc import Callable

import pytest

from tests.case import Case, Table
from tests.cluster import Cluster
from tests.parity import run_and_check

TABLES = (Table("a", 50), Table("b", 33), Table("c", 7))


@pytest.mark.parametrize("world_size", [1, 2, 4])
@pytest.mark.parametrize("optimizer", ["sgd", "adagrad", "rowwise_adagrad"])
@pytest.mark.parametrize("integers", [True, False], ids=["exact", "random"])
def test_training_equals_unsharded_and_stock(
    clusters: Callable[[int], Cluster], world_size: int, optimizer: str, integers: bool
) -> None:
    case = Case(
        tables=TABLES,
        batch_sizes=(6,) * world_size,
        kind="ec",
        optimizer=optimizer,
        integers=integers,
    )
    clusters(world_size).run(run_and_check, case, also_stock=True)


@pytest.mark.parametrize("batch_sizes", [(3, 9), (0, 4), (4, 0), (0, 0)])
def test_uneven_and_empty_batches(cluster_2: Cluster, batch_sizes: tuple[int, ...]) -> None:
    cluster_2.run(run_and_check, Case(tables=TABLES, batch_sizes=batch_sizes, kind="ec"))


def test_no_ids_at_all(cluster_2: Cluster) -> None:
    case = Case(tables=TABLES, batch_sizes=(3, 3), lengths=(0,), kind="ec")
    cluster_2.run(run_and_check, case)


def test_exact_counts_mode_and_int32_ids(cluster_2: Cluster) -> None:
    case = Case(
        tables=TABLES,
        batch_sizes=(5, 4),
        kind="ec",
        input_dist="exact_counts",
        id_dtype="int32",
        optimizer="adagrad",
    )
    cluster_2.run(run_and_check, case)


def test_several_features_per_table_and_tables_per_feature(cluster_2: Cluster) -> None:
    case = Case(
        tables=(
            Table("a", 20, features=("x", "y")),
            Table("b", 30, features=("y", "z")),
            Table("c", 25, features=("x", "z", "w")),
        ),
        batch_sizes=(4, 7),
        kind="ec",
        optimizer="rowwise_adagrad",
    )
    cluster_2.run(run_and_check, case)


def test_uneven_row_ranges_and_fp16(cluster_2: Cluster) -> None:
    case = Case(
        tables=(
            Table("a", 50, rows_per_rank=(3, 47)),
            Table("b", 20, dtype="fp16", rows_per_rank=(20, 0)),
        ),
        batch_sizes=(6, 6),
        kind="ec",
    )
    cluster_2.run(run_and_check, case)


@pytest.mark.parametrize("stock", ["table_wise", "row_wise", "column_wise", "data_parallel"])
def test_stock_tables_beside_fused_ones(cluster_2: Cluster, stock: str) -> None:
    case = Case(
        tables=(
            Table("a", 50),
            Table("s", 24, sharding=stock),
            Table("b", 33),
            Table("t", 10, sharding=stock),
        ),
        batch_sizes=(5, 5),
        kind="ec",
    )
    cluster_2.run(run_and_check, case)


def test_variable_batch_per_feature(cluster_2: Cluster) -> None:
    case = Case(tables=TABLES, batch_sizes=(5, 4), kind="ec", vbe=True, optimizer="adagrad")
    cluster_2.run(run_and_check, case)
