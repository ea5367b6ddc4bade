"""Who pools, and whether fusing pays, on both sides of every threshold."""

from dataclasses import replace

import pytest

from fusedrec_torchrec.access.row_classes import RowClasses
from fusedrec_torchrec.planner.cost.fusing import fusing_pays, who_pools
from fusedrec_torchrec.planner.cost.table_load import TableLoad
from tests.planner.cost.test_owners import repeated

BATCH = 1000
VAST = RowClasses.uniform(10**12)  # rows that never come twice


@pytest.mark.parametrize(("pooling", "pays"), [(0.5, True), (0.98, True), (1.02, False)])
def test_fusing_pays_up_to_a_row_for_each_output(pooling: float, pays: bool) -> None:
    assert fusing_pays(TableLoad("t", 10**12, 64, pooling, VAST), BATCH) is pays


@pytest.mark.parametrize(("features", "all_owned"), [(1.0, True), (1.1, False)])
def test_owners_pool_all_up_to_three_times_the_rows(features: float, all_owned: bool) -> None:
    """Unless bags were counted; a table with few rows has many more bags."""
    long = TableLoad("long", 10**12, 64, 2.0, VAST)
    few = TableLoad("few", 10, 64, 50.0, RowClasses.uniform(10), bags=features)
    tables = [long, few, replace(few, name="few too")]
    bags = sum(load.distinct_bags(BATCH).bags for load in tables)
    fewest = BATCH + 2 * 10
    assert 2.9 < bags / fewest < 3.2 and (bags / fewest <= 3) == all_owned
    assert who_pools(tables, BATCH, rows_known=True) == [True, all_owned, all_owned]


@pytest.mark.parametrize(("bags", "all_owned"), [(104, True), (108, False)])
def test_owners_pool_all_up_to_hardly_more_counted_rows(bags: int, all_owned: bool) -> None:
    long = replace(repeated("long", 1000, 5.0), classes=VAST)
    few = replace(repeated("few", bags, 20.0), rows=100, classes=RowClasses.uniform(100))
    assert who_pools([long, few], 1024, rows_known=True) == [True, all_owned]


def test_requesters_pool_all_if_no_table_has_fewer_bags() -> None:
    few = TableLoad("few", 10, 64, 50.0, RowClasses.uniform(10))
    assert who_pools([few, few], BATCH, rows_known=True) == [False, False]
