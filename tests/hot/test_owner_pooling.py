"""Hot rows beside tables that their owners pool, and in bags that repeat."""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import fusedrec_torchrec as fr
from fusedrec_torchrec.access.hot_set import HotSet
from tests.case import Case, Table, sharded
from tests.cluster import Cluster
from tests.hot.replicas import hot_rows, train_and_compare
from tests.hot.test_adapt import ADAPT

TABLES = (
    Table("a", 50, dim=8, pooling="mean", hot=(0, 1, 2, 25, 49)),
    Table("b", 33, dim=16, hot=(0, 17)),
    Table("c", 7, dim=8, hot=(0, 1, 2, 3, 4, 5, 6)),
    Table("d", 130, dim=4, pooling="mean", sharding="fused_table_wise"),
    Table("e", 40, dim=8, sharding="fused_column_wise"),
    Table("f", 20, dim=8),
)
OPTIONS: dict[str, fr.HotOptions | None] = {
    "plain": None,
    "hot batches": fr.HotOptions(hot_batches=True),
    "adapt": fr.HotOptions(adapt=ADAPT),
    "adapt, hot batches": fr.HotOptions(adapt=ADAPT, hot_batches=True),
}


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("world_size", [2, 4])
def test_training_equals_training_without_hot_rows(
    clusters: Callable[[int], Cluster], world_size: int, options: str
) -> None:
    case = Case(
        tables=TABLES,
        batch_sizes=(6, 4, 0, 5)[:world_size],
        optimizer="adagrad",
        steps=7,
        repeated=True,
        hot_options=OPTIONS[options],
    )
    clusters(world_size).run(train_and_compare, case)


@pytest.mark.parametrize(
    "settings",
    [
        {"vbe": True},
        {"weighted": True, "tables": tuple(dataclasses.replace(t, pooling="sum") for t in TABLES)},
        {"input_dist": "exact_counts", "batch_sizes": (0, 5)},
        {"lengths": (2, 4, 8), "batch_sizes": (8, 12)},
    ],
    ids=["vbe", "weighted", "exact counts", "requesters pool distinct bags"],
)
def test_other_batches(cluster_2: Cluster, settings: dict[str, Any]) -> None:
    given = {"tables": TABLES, "batch_sizes": (6, 4), "optimizer": "adagrad"} | settings
    cluster_2.run(train_and_compare, Case(repeated=True, **given))


def hot_ids_of(case: Case, options: fr.HotOptions) -> dict[str, list[int]]:
    model = sharded(case, hot=options)
    assert hot_rows(model) is not None
    return {name: ids.tolist() for name, ids in model.module.sparse.fused.hot_ids().items()}


def test_hot_rows_of_a_file_are_those_of_tables_whose_rows_travel(
    cluster_2: Cluster, tmp_path: Path
) -> None:
    """A file may be of a time when the planner had chosen otherwise."""
    path = tmp_path / "hot.npz"
    rows = {t.name: t.rows for t in TABLES}
    HotSet(rows, {"f": np.array([3, 5]), "d": np.array([1])}).save(path)
    tables = tuple(dataclasses.replace(t, hot=None) for t in TABLES)
    case = Case(tables=tables, batch_sizes=(4, 4))
    found = cluster_2.run(hot_ids_of, case, fr.HotOptions(hot_set=path))
    assert found == [{"f": [3, 5]}] * 2


def error_of(case: Case, hot: fr.HotOptions | None) -> str:
    try:
        sharded(case, hot=hot)
    except ValueError as error:
        return str(error)
    return "no error"


def test_hot_rows_of_a_table_that_its_owner_pools_are_refused(cluster_2: Cluster) -> None:
    case = Case(tables=TABLES, batch_sizes=(4, 4))
    for name, kind in (("d", "fused_table_wise"), ("e", "fused_column_wise")):
        hot = fr.HotOptions(tables={name: fr.HotRule(ids=(0, 1))})
        texts = cluster_2.run(error_of, case, hot)
        want = f"table {name!r} is {kind} and has hot rows, must be fused_row_wise: bags are "
        assert texts == [want + "pooled where the table is, not where a replica is"] * 2
