"""Groups with tables that their owners pool: as groups with others are."""

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest

import fusedrec_torchrec as fr
from tests.case import Case, Table
from tests.cluster import Cluster
from tests.exchange.test_large_lookups import run_by_table
from tests.grid.test_average import against_all_rows, one_step_late, overlapped, train
from tests.grid.test_errors import bad_batch
from tests.grid.test_gradients import train_and_compare, train_with_settings
from tests.grid.test_pipelines import compare

TABLES = (
    Table("a", 50, dim=8, pooling="mean", sharding="fused_table_wise"),
    Table("b", 33, dim=16, sharding="fused_column_wise"),
    Table("c", 7, dim=8),
    Table("d", 130, dim=4, sharding="fused_table_wise"),
)
WHOLE = tuple(
    dataclasses.replace(t, sharding="fused_table_wise") if t.name == "b" else t for t in TABLES
)
SUMS = tuple(dataclasses.replace(t, pooling="sum") for t in WHOLE)
BESIDE_STOCK = (*SUMS, Table("s", 20, sharding="table_wise"), Table("r", 9, sharding="row_wise"))


def case_of(size: int, ranks: int, grid: dict[str, Any], **settings: Any) -> Case:
    options = fr.GridOptions(sharding_group_size=size, **grid)
    given: dict[str, Any] = {"tables": TABLES, "batch_sizes": (6, 3, 0, 5)[:ranks]}
    given |= {"repeated": True} | settings
    return Case(grid=options, **given)


@pytest.mark.parametrize(("ranks", "size"), [(2, 1), (4, 2)])
@pytest.mark.parametrize("optimizer", ["sgd", "adagrad"])
@pytest.mark.parametrize("layout", ["replicas_adjacent", "groups_adjacent"])
def test_groups_train_as_whole_models_do(
    clusters: Callable[[int], Cluster], ranks: int, size: int, optimizer: str, layout: str
) -> None:
    case = case_of(size, ranks, {"layout": layout}, optimizer=optimizer)
    clusters(ranks).run(train, case)


@pytest.mark.parametrize(
    ("grid", "settings"),
    [
        ({"sync_every": 3}, {"steps": 7}),
        ({"rows": "all"}, {}),
        ({}, {"weighted": True, "tables": SUMS}),
        ({}, {"vbe": True, "batch_sizes": (6, 3, 4, 5)}),
        ({}, {"tables": BESIDE_STOCK, "batch_sizes": (5,) * 4}),
    ],
    ids=["every three steps", "all rows", "weighted", "vbe", "beside stock"],
)
def test_other_groups_that_average(
    cluster_4: Cluster, grid: dict[str, Any], settings: dict[str, Any]
) -> None:
    given = {"tables": WHOLE, "optimizer": "rowwise_adagrad"} | settings
    cluster_4.run(train, case_of(2, 4, grid, **given))


def train_by_table(case: Case) -> None:
    """Trains with bags that count as long, so that lookups number rows by table."""
    run_by_table(case, train)


@pytest.mark.parametrize("grid", [{}, {"sync_every": 3}], ids=["every step", "every three steps"])
def test_rows_of_long_bags_are_averaged(cluster_4: Cluster, grid: dict[str, Any]) -> None:
    tables = tuple(Table(name, 30, dim=8, sharding="fused_table_wise") for name in "abcdef")
    case = case_of(2, 4, grid, tables=tables, optimizer="rowwise_adagrad", steps=7)
    cluster_4.run(train_by_table, case)


SHARED = {"sync": "gradients"}


@pytest.mark.parametrize(("ranks", "size"), [(2, 1), (4, 2), (4, 1)])
@pytest.mark.parametrize("optimizer", ["sgd", "adagrad"])
@pytest.mark.parametrize("integers", [True, False], ids=["exact", "random"])
def test_groups_that_share_gradients_train_as_one(
    clusters: Callable[[int], Cluster], ranks: int, size: int, optimizer: str, integers: bool
) -> None:
    case = case_of(size, ranks, SHARED, optimizer=optimizer, integers=integers)
    clusters(ranks).run(train_and_compare, case)


@pytest.mark.parametrize(
    ("layout", "settings"),
    [
        ("replicas_adjacent", {"weighted": True, "tables": SUMS}),
        ("replicas_adjacent", {"vbe": True, "batch_sizes": (6, 3, 4, 5)}),
        ("groups_adjacent", {"input_dist": "exact_counts"}),
        ("groups_adjacent", {"tables": WHOLE[:2], "lengths": (1,)}),
    ],
    ids=["weighted", "vbe", "exact counts", "nothing but owner-pooled tables"],
)
def test_other_groups_that_share_gradients(
    cluster_4: Cluster, layout: str, settings: dict[str, Any]
) -> None:
    given = {"tables": WHOLE, "optimizer": "rowwise_adagrad"} | settings
    cluster_4.run(train_and_compare, case_of(2, 4, SHARED | {"layout": layout}, **given))


@pytest.mark.parametrize("clipped", [False, True])
def test_learning_rates_of_the_step_they_belong_to(cluster_4: Cluster, clipped: bool) -> None:
    settings = (("gradient_clipping", True), ("max_gradient", 0.5)) if clipped else ()
    case = case_of(2, 4, SHARED, tables=WHOLE, optimizer="rowwise_adagrad", settings=settings)
    cluster_4.run(train_with_settings, case, (0.5, 0.25, 0.25, 0.0, 1.0))


LARGE = tuple(dataclasses.replace(t, rows=40 * t.rows, pooling="sum") for t in TABLES)


@pytest.mark.parametrize("every", [1, 3])
def test_touched_rows_are_enough(cluster_4: Cluster, every: int) -> None:
    case = case_of(2, 4, {"sync_every": every}, tables=LARGE, optimizer="rowwise_adagrad", steps=6)
    for rank in cluster_4.run(against_all_rows, case):
        assert rank["sparse"] == 6 // every and rank["dense"] == 0
        assert rank["sent"][0] < rank["sent"][1]


def test_overlaps(cluster_4: Cluster) -> None:
    settings: dict[str, Any] = {"tables": LARGE, "batch_sizes": (5,) * 4}
    until = case_of(2, 4, {"overlap": "until_lookup"}, optimizer="rowwise_adagrad", **settings)
    cluster_4.run(overlapped, until)
    late = case_of(2, 4, {"overlap": "one_step"}, learning_rate=2.0, **settings)
    cluster_4.run(one_step_late, late)


@pytest.mark.parametrize(
    "options",
    [{"sync_every": 3}, {"overlap": "one_step"}, SHARED],
    ids=["every 3 steps", "one_step", "gradients"],
)
def test_pipeline_equals_plain_loop(cluster_4: Cluster, options: dict[str, Any]) -> None:
    cluster_4.run(compare, case_of(2, 4, options, optimizer="adagrad", batch_sizes=(6,) * 4))


@pytest.mark.parametrize("sync", ["weights", "gradients"])
def test_a_bad_bag_in_one_group_is_an_error_in_all(cluster_4: Cluster, sync: str) -> None:
    case = case_of(2, 4, {"sync": sync}, lengths=(1, 2), batch_sizes=(6, 3, 5, 4))
    (message,) = set(cluster_4.run(bad_batch, case, 3))
    assert message.startswith("bad input on rank 3: feature 'f_a' of table 'a': id 1000")
