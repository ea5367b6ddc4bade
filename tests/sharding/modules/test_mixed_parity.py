"""Fused and stock tables in one EmbeddingBagCollection."""

import pytest

from tests.case import Case, Table
from tests.cluster import Cluster
from tests.parity import run_and_check


@pytest.mark.parametrize("pooling", ["sum", "mean"])
@pytest.mark.parametrize("stock", ["table_wise", "row_wise", "column_wise", "data_parallel"])
def test_stock_tables_beside_fused_ones(cluster_2: Cluster, stock: str, pooling: str) -> None:
    case = Case(
        tables=(
            Table("a", 50),
            Table("s", 24, sharding=stock, pooling=pooling),
            Table("b", 33, dim=16, pooling="mean"),
            Table("t", 10, sharding=stock),
        ),
        batch_sizes=(5, 5),
    )
    cluster_2.run(run_and_check, case)


def test_all_shardings_in_one_module(cluster_2: Cluster) -> None:
    case = Case(
        tables=(
            Table("a", 50, sharding="row_wise", pooling="mean"),
            Table("b", 33, sharding="table_wise", pooling="mean"),
            Table("c", 12, pooling="mean"),
            Table("d", 41, sharding="column_wise"),
            Table("e", 9, dim=4),
            Table("f", 17, sharding="data_parallel"),
        ),
        batch_sizes=(5, 5),
    )
    cluster_2.run(run_and_check, case)


def test_no_fused_table_is_plain_torchrec(cluster_2: Cluster) -> None:
    case = Case(tables=(Table("a", 50), Table("b", 20)), batch_sizes=(5, 5)).only("table_wise")
    cluster_2.run(run_and_check, case)


@pytest.mark.parametrize("kind", ["ebc", "ec"])
@pytest.mark.parametrize("stock", ["table_wise", "row_wise", "column_wise"])
@pytest.mark.parametrize("length_dtype", ["int32", "int64"])
def test_empty_batch_beside_stock_tables(
    cluster_2: Cluster, kind: str, stock: str, length_dtype: str
) -> None:
    """Row-wise EmbeddingBagCollections need even batches on gloo, so there both are empty."""
    case = Case(
        tables=(Table("s", 24, sharding=stock), Table("a", 50), Table("t", 10, sharding=stock)),
        batch_sizes=(0, 0) if (kind, stock) == ("ebc", "row_wise") else (0, 4),
        kind=kind,
        length_dtype=length_dtype,
    )
    cluster_2.run(run_and_check, case)
