"""Steps of tables that their owners pool: bytes, seconds and memory."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from fusedrec_torchrec.access.bag_counts import CountedBags
from fusedrec_torchrec.access.distinct_bags import BagsByChance
from fusedrec_torchrec.access.row_classes import RowClasses, RowPlaces
from fusedrec_torchrec.planner.cost.cluster import ClusterConfig, RatesConfig
from fusedrec_torchrec.planner.cost.fusing import fusing_pays, who_pools
from fusedrec_torchrec.planner.cost.memory import (
    Placement,
    buffer_bytes,
    owner_bytes,
    table_bytes_W,
)
from fusedrec_torchrec.planner.cost.stages import Groups
from fusedrec_torchrec.planner.cost.step import fused_step, with_sync
from fusedrec_torchrec.planner.cost.table_load import TableLoad
from fusedrec_torchrec.sharding.sharding_type import (
    FUSED_COLUMN_WISE,
    FUSED_TABLE_WISE,
)
from tests.planner.search.test_decide import table

ZIPF = 1.05


def repeated(name: str, bags: int, length: float, rows: int = 10**6, **others: Any) -> TableLoad:
    """A table whose batches hold some bags again and again."""
    sizes = np.array([64, 256, 1024, 4096], np.int64)
    batches = np.ones(4, np.int64)
    found = np.minimum(sizes, bags)
    ids = (found * length).astype(np.int64)
    use = CountedBags(sizes, batches, found, ids, 4096, 4096, int(4096 * length))
    classes = RowClasses.zipf(rows, ZIPF)
    return TableLoad(name, rows, 64, length, classes, bag_use=use, **others)


def test_a_table_that_its_owner_pools_by_hand() -> None:
    load = TableLoad("b", 1000, 16, 3.0, RowClasses.uniform(1000), weighted=True)
    load = replace(load, bag_use=BagsByChance(RowClasses.uniform(10**9), 3.0))  # all differ
    step = fused_step([load], 4, 2, exact_counts=True, owners=[(1,)])
    stages = {stage.name: stage.amount_W.tolist() for stage in step.stages}
    assert step.collectives == 4 and stages["dedup"] == [4, 4] and stages["bag_dedup"] == [12, 12]
    # 4 lengths, 12 ids and 12 weights go from rank 0 to rank 1, and 4 rows come back.
    assert stages["ids"] == pytest.approx([28 * 4, 0])
    # Status, wanted capacity, overflow, bags and their ids.
    assert stages["counts"] == [5 * 4, 5 * 4]
    assert stages["rows"] == pytest.approx([0, 4 * 64])
    assert stages["gradients"] == pytest.approx([4 * 64, 0])
    # Of 2 requesters 4 bags each, whose first rows are like rows that are asked for.
    assert stages["lookup"] == stages["update"] == pytest.approx([0, 2 * 4 * 64])
    assert stages["bag_lookup"] == pytest.approx([0, 2 * 8 * 64])
    assert stages["owner_ids"] == stages["update_ids"] == pytest.approx([0, 2 * 12])
    assert stages["bag_update"] == stages["bag_lookup"]
    assert stages["pooling"] == stages["pooling_backward"] == [4 * 64, 4 * 64]
    columns = fused_step([load], 4, 2, exact_counts=True, owners=[(0, 1)])
    stages = {stage.name: stage.amount_W.tolist() for stage in columns.stages}
    assert stages["ids"] == pytest.approx([28 * 4] * 2)  # to both, half of which stays
    assert stages["rows"] == pytest.approx([4 * 32] * 2)
    assert stages["bag_lookup"] == pytest.approx([2 * 8 * 32] * 2)
    assert stages["owner_ids"] == pytest.approx([2 * 12] * 2)  # each goes through all of them


def test_mixed_types_are_one_exchange() -> None:
    tables = [table("a", 1000), table("b", 10**6, pooling=20.0), table("c", 10**6, pooling=9.0)]
    owners = [(), (0,), (0, 1)]
    step = fused_step(tables, 64, 2, owners=owners)
    assert step.collectives == 3 and step.buckets == 3
    for name in ("rows", "ids", "gradients"):
        alone = sum(
            next(p for p in fused_step([t], 64, 2, exact_counts=True, owners=[o]).stages
                 if p.name == name).amount_W
            for t, o in zip(tables, owners, strict=True)
        )  # fmt: skip
        exact = fused_step(tables, 64, 2, exact_counts=True, owners=owners)
        both = next(p for p in exact.stages if p.name == name).amount_W
        np.testing.assert_allclose(both, alone)
    cluster = ClusterConfig(ranks=2)
    dear = replace(cluster, fused=RatesConfig(bucket=100.0))
    assert step.seconds(dear) - step.seconds(cluster) == pytest.approx(200e-6)


def test_bags_that_repeat_are_pooled_once() -> None:
    again, never = repeated("a", 100, 20.0), table("a", 10**6, pooling=20.0, zipf=ZIPF)

    def amounts(load: TableLoad, own: tuple[int, ...]) -> dict[str, float]:
        step = fused_step([load], 1024, 2, owners=[own])
        return {stage.name: float(stage.amount_W.max()) for stage in step.stages}

    assert amounts(again, (0,))["rows"] == pytest.approx(100 * 64 * 4)
    assert amounts(never, (0,))["rows"] == pytest.approx(1024 * 64 * 4)
    # The requester, too, pools equal bags once, and copies.
    assert amounts(again, ())["pooling"] == pytest.approx((100 * 20 + 1024) * 64 * 4)
    assert amounts(never, ())["pooling"] == pytest.approx(1024 * 20 * 64 * 4)


def test_memory_of_owners() -> None:
    load = TableLoad("t", 1000, 64, 4.0, RowClasses.uniform(10**6))
    on = {
        own: table_bytes_W(load, Placement(FUSED_COLUMN_WISE, own), 4).tolist()
        for own in ((2,), (0, 3))
    }
    assert on[(2,)] == [0, 0, load.size, 0]
    half = 1000 * (32 * 4 + 4)  # each shard has its own state of rows
    assert on[(0, 3)] == [half, 0, 0, half]
    adagrad = replace(load, state_bytes=64 * 4)
    assert table_bytes_W(adagrad, Placement(FUSED_COLUMN_WISE, (1, 2)), 4).sum() == adagrad.size
    bags = load.distinct_bags(16)
    one, two = (owner_bytes(load, 16, 4, FUSED_COLUMN_WISE, n) for n in (1, 2))
    assert one - two == pytest.approx(4 * 2 * bags.bags * 32 * 4)
    assert buffer_bytes(load, FUSED_TABLE_WISE, 16, 4) > 2 * 16 * 64 * 4


def test_replicas_of_whole_tables_are_synced_by_their_owners() -> None:
    load = table("t", 1000, pooling=5.0)
    step = fused_step([load], 8, 2, owners=[(1,)])
    synced = with_sync(step, [load], 8, Groups(2, 3), owners=[(1,)])
    stages = {stage.name: stage.amount_W for stage in synced.stages}
    assert stages["sync_rows"][0] == 0 and stages["sync_rows"][1] > 0


def test_every_owner_of_columns_says_whose_gradients_it_shares() -> None:
    load = table("t", 1000, 16, pooling=5.0)
    step = fused_step([load], 8, 2, owners=[(0, 1)])
    synced = with_sync(step, [load], 8, Groups(2, 3, sync="gradients"), owners=[(0, 1)])
    sent = next(stage.amount_W for stage in synced.stages if stage.name == "sync_gradients")
    assert sent == pytest.approx([2 * load.unique(16) * (8 + 1) * 4] * 2)


def test_a_zipf_law_says_how_many_rows_are_distinct() -> None:
    uniform = RowClasses.uniform(10**6)
    # With ids that are all alike, bags of two would have half as many rows again.
    few = TableLoad("t", 10**4, 64, 2.0, RowClasses.uniform(10**4))
    assert few.unique(4096) > 1.3 * few.distinct_bags(4096).bags and who_pools([few], 4096) == [
        False
    ]
    assert who_pools([TableLoad("t", 10**6, 64, 20.0, uniform)], 4096) == [True]
    assert who_pools([TableLoad("t", 10**6, 64, 1.0, uniform)], 4096) == [False]
    assert who_pools([TableLoad("t", 50, 64, 20.0, RowClasses.uniform(50))], 4096) == [False]
    assert who_pools([TableLoad("t", 10**6, 64, 20.0, uniform, pooled=False)], 4096) == [False]


def test_few_more_rows_split_a_module_only_where_bags_were_counted() -> None:
    """All bags differ, by a law or as counted; owners of both would send a third more rows."""
    long = TableLoad("long", 10**6, 64, 20.0, RowClasses.zipf(10**6, ZIPF))
    short = TableLoad("short", 2000, 64, 3.0, RowClasses.uniform(2000))
    law = [long, short]
    scattered = [
        replace(t, bag_use=BagsByChance(t.classes, t.pooling, scattered=True)) for t in law
    ]
    counted = [replace(t, bag_use=repeated("t", 4096, t.pooling).bag_use) for t in law]
    for tables in (law, scattered, [long, counted[1]], [counted[0], short]):
        assert who_pools(tables, 4096, rows_known=True) == [True, True]
    assert who_pools(counted, 4096, rows_known=True) == [True, False]


def test_bags_of_one_id_are_counted_if_rows_were() -> None:
    classes = RowClasses.uniform(10)
    places = RowPlaces(10, np.arange(10), np.full(10, 0.1), 0.0)
    one = TableLoad("t", 10, 64, 1.0, classes)
    assert not one.bags_are_counted and replace(one, places=places).bags_are_counted
    assert not replace(one, places=places, pooling=3.0).bags_are_counted


@pytest.mark.parametrize("others", [1, 2, 3, 4])
def test_owners_pool_all_if_that_is_no_more_rows_should_a_third_of_bags_be_distinct(
    others: int,
) -> None:
    """Bags were not counted, as in MLPerf's data; then what is assumed counts thrice."""
    long = table("long", 10**7, pooling=20.0)
    few = [table(f"few {t}", 50, pooling=20.0) for t in range(others)]
    fewest = 4096 + others * 50
    likely = (1 + others) * 4096 / 3
    found = who_pools([long, *few], 4096, rows_known=True)
    assert found == [True] + [likely <= fewest] * others
    # Where bags were counted, nothing is assumed.
    counted = [repeated(load.name, 10**6, 20.0, load.rows) for load in (long, *few)]
    assert who_pools(counted, 4096, rows_known=True) == [True] + [False] * others


@pytest.mark.parametrize(
    ("rows", "pooling", "pays"),
    [
        (10**9, 1.0, True),
        (10**9, 1.05, False),
        (10**9, 2.0, False),
        (900, 2.0, True),
        (50, 20.0, True),
    ],
)
def test_to_fuse_pays_if_no_more_rows_than_bags_travel(
    rows: int, pooling: float, pays: bool
) -> None:
    load = table("t", rows, pooling=pooling)
    assert (load.unique(1024) <= 1024 + 1e-6) == pays  # what stock shardings send
    assert fusing_pays(load, 1024) == pays
