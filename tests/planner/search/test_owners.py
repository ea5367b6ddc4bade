"""Who pools a table: its requesters, where rows are few; its owners, where bags are."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from fusedrec_torchrec.planner.cost.cluster import ClusterConfig, LinkConfig, RatesConfig
from fusedrec_torchrec.planner.cost.stages import Groups
from fusedrec_torchrec.planner.cost.step import fused_step
from fusedrec_torchrec.planner.cost.table_load import TableLoad
from fusedrec_torchrec.planner.search.decide import decide
from fusedrec_torchrec.planner.search.owners import column_splits, neighbours
from fusedrec_torchrec.planner.search.prices import LOADS, Prices
from fusedrec_torchrec.planner.search.search_config import GroupsConfig, SearchConfig
from fusedrec_torchrec.sharding.sharding_type import (
    FUSED,
    FUSED_COLUMN_WISE,
    FUSED_TABLE_WISE,
    FUSED_TYPES,
    OWNER_POOLED,
)
from tests.planner.cost.test_owners import ZIPF, repeated
from tests.planner.search.test_decide import BATCH, FREE, quick, table


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize(
    "owners", [[(0,), (1,), (2,)], [(0, 1), (2, 3), (0, 3)], [(0, 1, 2, 3), (1,), (1, 2)]]
)
def test_prices_add_up(exact: bool, owners: list[tuple[int, ...]]) -> None:
    """But for the rounding of messages."""
    tables = [table(f"t{t}", 10**5, 64, 5.0 * (t + 1)) for t in range(3)]
    link = LinkConfig(all_to_all=3.0, latency=40.0)
    cluster = ClusterConfig(device="cpu", ranks=4, ranks_per_node=4, within_node=link)
    of = Prices(tables, BATCH, cluster, Groups(4), FUSED_TYPES, [False] * 3, exact)
    loads = np.zeros((LOADS, 4))
    for t, own in enumerate(owners):
        loads[:, list(own)] += of.load_of(FUSED_TABLE_WISE, t, len(own))[:, None]
    total = of.of_use[FUSED_TABLE_WISE] + of.of_tables[FUSED_TABLE_WISE].sum()
    total += of.of_owned(FUSED_TABLE_WISE, loads)
    step = fused_step(tables, BATCH, 4, exact_counts=exact, owners=owners)
    assert total == pytest.approx(step.seconds(cluster), rel=5e-3)
    # But for the word of the header that says how many ids bags have.
    assert of.of_use[FUSED_TABLE_WISE] == pytest.approx(of.of_use[FUSED], rel=1e-4)


def systems_of(*tables: TableLoad, ranks: int = 2, **settings: Any) -> tuple[str, ...]:
    return decide(list(tables), 1024, quick(ranks, **settings)).systems


def test_who_sends_fewer_rows_pools() -> None:
    """Where bytes decide; and owners that add up ids fast only ever pool more."""
    bytes_decide: dict[str, Any] = {"fused": FREE}
    one_hot = table("one hot", 10**6, zipf=ZIPF)
    assert systems_of(one_hot) == systems_of(one_hot, **bytes_decide) == (FUSED,)
    assert systems_of(table("few rows", 50, pooling=20.0), **bytes_decide) == (FUSED,)
    for load in (
        table("unique", 10**6, pooling=20.0, zipf=ZIPF),
        repeated("again", 100, 20.0),
        repeated("short", 100, 2.0),  # few bags again and again are fewer than rows
    ):
        assert systems_of(load)[0] in OWNER_POOLED
        assert systems_of(load, **bytes_decide)[0] in OWNER_POOLED


def test_owners_pool_though_more_rows_travel_if_that_is_less_work() -> None:
    """Every id of a bag is made unique if requesters pool, and only read if owners do."""
    few = table("few rows", 50, pooling=20.0)
    assert few.has_more_bags(1024)
    slow = RatesConfig(step=0.0, table=0.0, ids=1.0, bag_ids=1000.0)
    assert systems_of(few, fused=slow)[0] in OWNER_POOLED
    quickly = RatesConfig(step=0.0, table=0.0, ids=1000.0, bag_ids=1.0)
    assert systems_of(few, fused=quickly) == (FUSED,)


def test_rows_that_travel_are_the_fewest() -> None:
    tables = [
        *(table(f"one hot {t}", 10**5, zipf=ZIPF) for t in range(6)),
        *(table(f"unique {t}", 10**6, pooling=20.0, zipf=ZIPF) for t in range(4)),
        *(repeated(f"again {t}", 300, 8.0) for t in range(4)),
        *(table(f"few {t}", 40, pooling=12.0) for t in range(4)),
    ]
    found = decide(tables, 1024, quick(4), SearchConfig(row_ranges="even"))
    (step,) = found.steps
    rows = next(stage for stage in step.stages if stage.name == "rows").bytes_sent / (3 * 64 * 4)
    fewest = 4 * sum(min(t.unique(1024), t.distinct_bags(1024).bags) for t in tables) / 4
    assert rows == pytest.approx(fewest, rel=1e-6)
    assert step.collectives == 3 + found.exact_counts


def test_stock_shardings_are_for_tables_that_cannot_be_fused() -> None:
    """Or for all, if that is the shortest step."""
    loads = [table("a", 10**5, pooling=20.0), table("b", 10**5, pooling=20.0, dim=62)]
    systems = decide(loads, 1024, quick(2), unfit=["b"]).systems
    assert systems[0] in FUSED_TYPES and systems[1] not in FUSED_TYPES
    slow = RatesConfig(step=0.0, table=0.0, ids=0.1, lookup=0.1, pooling=0.1)
    found = decide(loads, 1024, quick(2, fused=slow, stock=FREE), unfit=["b"])
    assert found.systems == ("table_wise", "table_wise") and found.owners[0] != found.owners[1]
    wanted = SearchConfig(tables={"a": ["table_wise"]})
    assert decide(loads, 1024, quick(2), wanted, ["b"]).systems[0] == "table_wise"


def test_load_is_balanced_over_ranks() -> None:
    poolings = [40, 30, 20, 20, 10, 10, 10, 5, 5, 5, 3, 2]
    tables = [table(f"t{t}", 10**6, pooling=float(p)) for t, p in enumerate(poolings)]
    for ranks in (2, 3, 4):
        found = decide(tables, 1024, quick(ranks))
        (step,) = found.steps
        for name in ("rows", "bag_lookup"):
            work = next(stage for stage in step.stages if stage.name == name).amount_W
            assert work.max() <= 1.15 * work.mean(), (ranks, name)


def test_one_table_is_split_by_columns_if_that_is_balance() -> None:
    found = decide([table("t", 10**6, 128, pooling=50.0)], 1024, quick(4))
    assert found.systems == (FUSED_COLUMN_WISE,) and len(found.owners[0]) > 1
    assert column_splits(128, 4) == (2, 4) and column_splits(8, 4) == (2,)
    assert column_splits(12, 3) == (3,) and column_splits(4, 2) == () == column_splits(64, 1)
    narrow = decide([table("t", 10**6, 4, pooling=50.0)], 1024, quick(4))
    assert narrow.systems[0] != FUSED_COLUMN_WISE


def test_rows_make_up_for_whole_tables() -> None:
    """Ranges of other tables are shorter on the rank that pools."""
    tables = [*(table(f"t{t}", 10**5) for t in range(4)), table("long", 10**6, pooling=50.0)]
    search = SearchConfig(systems=["fused_row_wise"], tables={"long": ["fused_table_wise"]})
    found = decide(tables, 1024, quick(2, fused=RatesConfig(step=0.0, lookup=1e6)), search)
    assert found.ranges is not None
    ((owner,),) = found.owners[-1:]
    own = np.diff(found.ranges[0])
    assert own[owner] < own[1 - owner]
    (step,) = found.steps
    rows = next(stage for stage in step.stages if stage.name == "rows").amount_W
    assert rows.max() < 1.02 * rows.mean()


@pytest.mark.parametrize(
    ("share", "possible"), [(1.2, OWNER_POOLED), (0.6, (FUSED_COLUMN_WISE,)), (0.52, (FUSED,))]
)
def test_memory_decides_how_a_table_is_split(share: float, possible: tuple[str, ...]) -> None:
    load = table("t", 2 * 10**6, 16, pooling=20.0, state_bytes=4)
    memory = share * load.size / 1e9
    search = SearchConfig(systems=list(FUSED_TYPES))  # type: ignore[arg-type]
    found = decide([load], 256, quick(2, memory=memory), search)
    assert found.systems[0] in possible
    assert found.memory_W.max() <= memory * 1e9


def test_whole_tables_that_do_not_fit_are_named() -> None:
    load = table("t", 10**6, pooling=20.0)
    cluster = quick(2, memory=0.4 * load.size / 1e9)
    for system in OWNER_POOLED:
        search = SearchConfig(systems=[system])  # type: ignore[list-item]
        with pytest.raises(ValueError, match=rf"'t' does not fit: with {system} it needs"):
            decide([load], 256, cluster, search)


def test_sequences_and_others_are_never_pooled_by_owners() -> None:
    for load in (
        table("s", 10**6, pooling=20.0, pooled=False),
        table("p", 10**6, pooling=20.0, can_be_owned=False),
    ):
        assert decide([load], 1024, quick(2)).systems[0] not in OWNER_POOLED
        search = SearchConfig(systems=["fused_table_wise", "fused_column_wise"])
        with pytest.raises(ValueError, match="which it cannot: owners pool bags, not sequences"):
            decide([load], 1024, quick(2), search)


def test_groups_that_share_gradients_have_fused_tables() -> None:
    load = table("t", 10**5, 12, pooling=20.0)  # columns for three ranks, not for six
    groups = GroupsConfig(sizes=[3], sync="gradients")
    search = SearchConfig(groups=groups, systems=["fused_column_wise"])
    found = decide([load], 64, quick(6), search)
    assert found.systems == (FUSED_COLUMN_WISE,) and found.groups.number == 2
    assert any(stage.name == "sync_gradients" for stage in found.steps[0].stages)
    stock = replace(search, systems=["column_wise"])
    with pytest.raises(ValueError, match="cannot be column_wise"):
        decide([load], 64, quick(6), stock)


WIDE = table("t", 10**6, 256, pooling=20.0)


def test_owners_that_are_tried_are_all_on_few_ranks() -> None:
    for ranks in (1, 2, 3, 4):
        for system in ("table_wise", FUSED_TABLE_WISE):
            assert [*neighbours(system, WIDE, ranks)] == [(rank,) for rank in range(ranks)]
    assert [*neighbours(FUSED_COLUMN_WISE, WIDE, 1)] == []
    assert [*neighbours(FUSED_COLUMN_WISE, WIDE, 2)] == [(0, 1)]
    assert [*neighbours(FUSED_COLUMN_WISE, WIDE, 3)] == [(0, 1), (1, 2)]
    assert [*neighbours(FUSED_COLUMN_WISE, WIDE, 4)] == [(0, 1), (1, 2), (2, 3), (0, 1, 2, 3)]
    assert [*neighbours(FUSED_COLUMN_WISE, replace(WIDE, dim=4), 4)] == []


@pytest.mark.parametrize("ranks", [5, 6, 8, 12, 16])
def test_owners_that_are_tried_reach_every_rank_once(ranks: int) -> None:
    """Columns are split in each way that is possible, and no two of one size overlap."""
    assert [*neighbours(FUSED_TABLE_WISE, WIDE, ranks)] == [(rank,) for rank in range(ranks)]
    by_size: dict[int, list[int]] = {}
    for own in neighbours(FUSED_COLUMN_WISE, WIDE, ranks):
        assert own == tuple(range(own[0], own[0] + len(own)))
        by_size.setdefault(len(own), []).extend(own)
    assert tuple(by_size) == column_splits(WIDE.dim, ranks) != ()
    for size, tried in by_size.items():
        assert tried == [*range(ranks - ranks % size)]


def test_owners_that_are_tried_on_many_ranks_are_the_first_ones() -> None:
    """The others are found by their load; so the search does not grow with their square."""
    for ranks in (17, 64, 1000):
        assert [*neighbours(FUSED_TABLE_WISE, WIDE, ranks)] == [(0,)]
        assert [*neighbours(FUSED_COLUMN_WISE, WIDE, ranks)] == [
            tuple(range(split)) for split in column_splits(WIDE.dim, ranks)
        ]


def test_shardings_without_owners_are_tried_once() -> None:
    for system in (FUSED, "row_wise", "data_parallel"):
        for ranks in (2, 64):
            assert [*neighbours(system, WIDE, ranks)] == [()]
