"""Who pools a table: its requesters, where rows are few; its owners, where bags are."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torchrec.distributed.planner.types import ParameterConstraints, Topology
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.modules.feature_processor_ import PositionWeightedModuleCollection
from torchrec.modules.fp_embedding_modules import FeatureProcessedEmbeddingBagCollection

import fusedrec_torchrec as fr
from fusedrec_torchrec.access.access_profile import AccessProfile
from fusedrec_torchrec.access.bag_counts import CountedBags
from fusedrec_torchrec.access.distinct_bags import BagsByChance
from fusedrec_torchrec.access.row_classes import RowClasses
from fusedrec_torchrec.planner.cost.cluster import ClusterConfig, LinkConfig, RatesConfig
from fusedrec_torchrec.planner.cost.fusing import owner_pools
from fusedrec_torchrec.planner.cost.memory import (
    Placement,
    buffer_bytes,
    owner_bytes,
    table_bytes_W,
)
from fusedrec_torchrec.planner.cost.parts import Groups
from fusedrec_torchrec.planner.cost.step import fused_step, with_sync
from fusedrec_torchrec.planner.cost.table_load import TableLoad
from fusedrec_torchrec.planner.report.explain import Explanation, print_explanation
from fusedrec_torchrec.planner.search.decide import decide
from fusedrec_torchrec.planner.search.owners import column_splits
from fusedrec_torchrec.planner.search.prices import LOADS, Prices
from fusedrec_torchrec.planner.search.search_config import GroupsConfig, SearchConfig
from fusedrec_torchrec.sharding.plan_file import (
    plan_file_of,
    read_plan,
    sharding_plan_of,
    write_plan,
)
from fusedrec_torchrec.sharding.sharding_type import (
    FUSED,
    FUSED_COLUMN_WISE,
    FUSED_TABLE_WISE,
    FUSED_TYPES,
    OWNER_POOLED,
)
from tests.planner.test_decide import BATCH, quick, table
from tests.planner.test_planner import Model, only, planner, types

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


# ---------------------------------------------------------------- prices


def test_a_table_that_its_owner_pools_by_hand() -> None:
    load = TableLoad("b", 1000, 16, 3.0, RowClasses.uniform(1000), weighted=True)
    load = replace(load, bag_use=BagsByChance(RowClasses.uniform(10**9), 3.0))  # all differ
    step = fused_step([load], 4, 2, exact_counts=True, owners=[(1,)])
    parts = {part.name: part.amount_W.tolist() for part in step.parts}
    assert step.collectives == 4 and parts["dedup"] == [4, 4] and parts["bag_dedup"] == [12, 12]
    # 4 lengths, 12 ids and 12 weights go from rank 0 to rank 1, and 4 rows come back.
    assert parts["ids"] == pytest.approx([28 * 4, 0])
    assert parts["rows"] == pytest.approx([0, 4 * 64])
    assert parts["gradients"] == pytest.approx([4 * 64, 0])
    assert parts["lookup"] == parts["update"] == pytest.approx([0, 2 * load.unique(4) * 64])
    assert parts["bag_lookup"] == pytest.approx([0, 2 * 12 * 64])
    assert parts["bag_update"] == parts["bag_lookup"]
    assert parts["pooling"] == parts["pooling_backward"] == [4 * 64, 4 * 64]
    columns = fused_step([load], 4, 2, exact_counts=True, owners=[(0, 1)])
    parts = {part.name: part.amount_W.tolist() for part in columns.parts}
    assert parts["ids"] == pytest.approx([28 * 4] * 2)  # to both, half of which stays
    assert parts["rows"] == pytest.approx([4 * 32] * 2)
    assert parts["bag_lookup"] == pytest.approx([2 * 12 * 32] * 2)


def test_mixed_types_are_one_exchange() -> None:
    tables = [table("a", 1000), table("b", 10**6, pooling=20.0), table("c", 10**6, pooling=9.0)]
    owners = [(), (0,), (0, 1)]
    step = fused_step(tables, 64, 2, owners=owners)
    assert step.collectives == 3 and step.buckets == 3
    for name in ("rows", "ids", "gradients"):
        alone = sum(
            next(p for p in fused_step([t], 64, 2, exact_counts=True, owners=[o]).parts
                 if p.name == name).amount_W
            for t, o in zip(tables, owners, strict=True)
        )  # fmt: skip
        exact = fused_step(tables, 64, 2, exact_counts=True, owners=owners)
        both = next(p for p in exact.parts if p.name == name).amount_W
        np.testing.assert_allclose(both, alone)
    cluster = ClusterConfig(ranks=2)
    dear = replace(cluster, fused=RatesConfig(bucket=100.0))
    assert step.seconds(dear) - step.seconds(cluster) == pytest.approx(200e-6)


def test_bags_that_repeat_are_pooled_once() -> None:
    again, never = repeated("a", 100, 20.0), table("a", 10**6, pooling=20.0, zipf=ZIPF)

    def amounts(load: TableLoad, own: tuple[int, ...]) -> dict[str, float]:
        step = fused_step([load], 1024, 2, owners=[own])
        return {part.name: float(part.amount_W.max()) for part in step.parts}

    assert amounts(again, (0,))["rows"] == pytest.approx(100 * 64 * 4)
    assert amounts(never, (0,))["rows"] == pytest.approx(1024 * 64 * 4)
    # The requester, too, pools equal bags once, and copies.
    assert amounts(again, ())["pooling"] == pytest.approx((100 * 20 + 1024) * 64 * 4)
    assert amounts(never, ())["pooling"] == pytest.approx(1024 * 20 * 64 * 4)


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
    assert of.of_use[FUSED_TABLE_WISE] == pytest.approx(of.of_use[FUSED])


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
    parts = {part.name: part.amount_W for part in synced.parts}
    assert parts["sync_rows"][0] == 0 and parts["sync_rows"][1] > 0


# ---------------------------------------------------------------- decisions


def systems_of(*tables: TableLoad, ranks: int = 2, **settings: Any) -> tuple[str, ...]:
    return decide(list(tables), 1024, quick(ranks, **settings)).systems


def test_who_sends_fewer_rows_pools() -> None:
    assert systems_of(table("one hot", 10**6, zipf=ZIPF)) == (FUSED,)
    assert systems_of(table("unique", 10**6, pooling=20.0, zipf=ZIPF))[0] in OWNER_POOLED
    assert systems_of(repeated("again", 100, 20.0))[0] in OWNER_POOLED
    assert systems_of(table("few rows", 50, pooling=20.0)) == (FUSED,)
    # Few bags again and again are fewer than rows, even of short ones.
    assert systems_of(repeated("short", 100, 2.0))[0] in OWNER_POOLED


def test_rows_that_travel_are_the_fewest() -> None:
    tables = [
        *(table(f"one hot {t}", 10**5, zipf=ZIPF) for t in range(6)),
        *(table(f"unique {t}", 10**6, pooling=20.0, zipf=ZIPF) for t in range(4)),
        *(repeated(f"again {t}", 300, 8.0) for t in range(4)),
        *(table(f"few {t}", 40, pooling=12.0) for t in range(4)),
    ]
    found = decide(tables, 1024, quick(4), SearchConfig(row_ranges="even"))
    (step,) = found.steps
    rows = next(part for part in step.parts if part.name == "rows").bytes_sent / (3 * 64 * 4)
    fewest = 4 * sum(min(t.unique(1024), t.distinct_bags(1024).bags) for t in tables) / 4
    assert rows == pytest.approx(fewest, rel=1e-6)
    assert step.collectives == 3 + found.exact_counts


def test_stock_shardings_are_for_tables_that_cannot_be_fused() -> None:
    cheap = RatesConfig(step=0.0, table=0.0, ids=1e6, lookup=1e6, pooling=1e6)
    loads = [table("a", 10**5, pooling=20.0), table("b", 10**5, pooling=20.0, dim=62)]
    systems = decide(loads, 1024, quick(2, stock=cheap), unfit=["b"]).systems
    assert systems[0] not in ("table_wise", "column_wise") and systems[1] not in FUSED_TYPES
    wanted = SearchConfig(tables={"a": ["table_wise"]})
    assert decide(loads, 1024, quick(2), wanted, ["b"]).systems[0] == "table_wise"


def test_load_is_balanced_over_ranks() -> None:
    poolings = [40, 30, 20, 20, 10, 10, 10, 5, 5, 5, 3, 2]
    tables = [table(f"t{t}", 10**6, pooling=float(p)) for t, p in enumerate(poolings)]
    for ranks in (2, 3, 4):
        found = decide(tables, 1024, quick(ranks))
        (step,) = found.steps
        for name in ("rows", "bag_lookup"):
            work = next(part for part in step.parts if part.name == name).amount_W
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
    search = SearchConfig(tables={"long": ["fused_table_wise"]})
    found = decide(tables, 1024, quick(2, fused=RatesConfig(step=0.0, lookup=1e6)), search)
    assert found.ranges is not None
    ((owner,),) = found.owners[-1:]
    own = np.diff(found.ranges[0])
    assert own[owner] < own[1 - owner]
    (step,) = found.steps
    rows = next(part for part in step.parts if part.name == "rows").amount_W
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


def test_groups_that_share_gradients_have_fused_rows() -> None:
    tables = [table("t", 10**5, pooling=20.0)]
    groups = GroupsConfig(sizes=[2], sync="gradients")
    search = SearchConfig(groups=groups, systems=["fused_table_wise", "fused_row_wise"])
    slow = LinkConfig(all_to_all=1e-3)
    near = LinkConfig(all_to_all=1e3, latency=0.0)
    cluster = quick(4, ranks_per_node=2, within_node=near, between_nodes=slow)
    found = decide(tables, 64, cluster, search)
    assert found.groups.number == 1 or found.systems == (FUSED,)
    only_whole = replace(search, systems=["fused_table_wise"])
    assert decide(tables, 64, cluster, only_whole).groups.number == 1


def test_it_is_explained(capsys: pytest.CaptureFixture[str]) -> None:
    tables = [
        table("one hot", 10**6, zipf=ZIPF),
        repeated("again", 100, 20.0),
        table("few rows", 50, pooling=20.0),
        table("s", 1000, pooling=3.0, pooled=False),
    ]
    search = SearchConfig()
    explanation = Explanation(decide(tables, 1024, quick(2), search), search)
    print_explanation(explanation)
    text = capsys.readouterr().out
    assert "100 distinct bags are fewer than" in text and "25.0 KiB of rows" in text
    assert "50 distinct rows are no more than 1,024 distinct bags" in text
    assert "a sequence" in text and "all fused_row_wise" in text
    assert explanation.price(3, FUSED_TABLE_WISE) is None
    assert explanation.price(0, FUSED_COLUMN_WISE) is not None
    tight = decide(tables[1:2], 64, quick(2, memory=0.7 * tables[1].size / 1e9))
    assert Explanation(tight, search).why(0)


# ---------------------------------------------------------------- models and TorchRec's search


def bags(dim: int = 64, **rows: int) -> nn.Module:
    model = nn.Module()
    model.bags = EmbeddingBagCollection(
        tables=[
            EmbeddingBagConfig(name=n, num_embeddings=r, embedding_dim=dim, feature_names=[n])
            for n, r in rows.items()
        ],
        device=torch.device("meta"),
    )
    return model


def pooling(**factors: float) -> dict[str, ParameterConstraints]:
    return {name: ParameterConstraints(pooling_factors=[f]) for name, f in factors.items()}


def test_without_a_cluster_bags_and_rows_decide() -> None:
    model = bags(one=10**6, long=10**6, few=50, two=10**4)
    constraints = pooling(long=20.0, few=20.0, two=2.0)
    one = planner(constraints=constraints, batch_size=4096)
    found = types(one.plan(model, fr.fused_sharders()))
    assert found["one"] == found["few"] == found["two"] == FUSED
    assert found["long"] in OWNER_POOLED


def test_without_a_cluster_load_is_balanced() -> None:
    names = [f"t{t}" for t in range(8)]
    model = bags(**dict.fromkeys(names, 10**6))
    constraints = pooling(**dict.fromkeys(names, 20.0))
    plan: Any = planner(4, constraints=constraints).plan(model, fr.fused_sharders()).plan["bags"]
    load = np.zeros(4)
    for entry in plan.values():
        assert entry.sharding_type in OWNER_POOLED
        load[entry.ranks] += 1 / len(entry.ranks)
    assert load.tolist() == [2.0] * 4
    alone: Any = planner(4, constraints=pooling(t=20.0)).plan(bags(t=10**6), fr.fused_sharders())
    entry = alone.plan["bags"]["t"]
    assert entry.sharding_type == FUSED_COLUMN_WISE and sorted(entry.ranks) == [0, 1, 2, 3]
    assert [shard.shard_sizes for shard in entry.sharding_spec.shards] == [[10**6, 16]] * 4


def test_without_a_cluster_a_table_goes_where_it_fits() -> None:
    size = 10**6 * 64 * 4
    topology = Topology(world_size=2, local_world_size=2, compute_device="cpu", ddr_cap=size)
    one = fr.FusedShardingPlanner(topology, 64, constraints=pooling(t=20.0))
    entry = one.plan(bags(t=10**6), fr.fused_sharders()).plan["bags"]["t"]
    assert entry.sharding_type in (FUSED_COLUMN_WISE, FUSED)
    assert max(s.shard_sizes[0] * s.shard_sizes[1] for s in entry.sharding_spec.shards) * 4 < size


def test_columns_of_a_table_are_on_different_ranks_even_if_not_on_all() -> None:
    constraints = only(t=FUSED_COLUMN_WISE)
    plan: Any = planner(3, constraints=constraints).plan(bags(t=100), fr.fused_sharders())
    entry = plan.plan["bags"]["t"]
    assert len(entry.ranks) == len(set(entry.ranks)) == 2
    placed = [shard.placement.rank() for shard in entry.sharding_spec.shards]
    assert placed == entry.ranks


@pytest.mark.parametrize("sharding", OWNER_POOLED)
def test_owners_are_asked_for_by_constraints(sharding: str) -> None:
    names = ("a", "b", "c")
    constraints = only(**dict.fromkeys(names, sharding), s=FUSED)
    found = types(planner(constraints=constraints).plan(Model(), fr.fused_sharders()))
    assert {found[name] for name in names} == {sharding}
    cluster = quick(2)
    one = fr.FusedShardingPlanner(batch_size=64, cluster=cluster, constraints=constraints)
    assert types(one.plan(Model(), fr.fused_sharders())) == found
    with pytest.raises(RuntimeError, match="No available sharding type"):
        planner(constraints=only(s=sharding)).plan(Model(), fr.fused_sharders())


def test_hot_rows_and_processed_features_stay_with_requesters() -> None:
    constraints = pooling(t=20.0)
    hot = fr.fused_sharders(hot=fr.HotOptions(tables={"t": fr.HotRule(top_k=5)}))
    assert types(planner(constraints=constraints).plan(bags(t=10**6), hot))["t"] not in OWNER_POOLED
    one = fr.FusedShardingPlanner(batch_size=512, cluster=quick(2), constraints=constraints)
    assert types(one.plan(bags(t=10**6), hot))["t"] not in OWNER_POOLED
    assert types(one.plan(bags(t=10**6), fr.fused_sharders()))["t"] in OWNER_POOLED
    model = nn.Module()
    collection = EmbeddingBagCollection(
        tables=[
            EmbeddingBagConfig(
                name="t", num_embeddings=10**6, embedding_dim=64, feature_names=["t"]
            )
        ],
        is_weighted=True,
        device=torch.device("meta"),
    )
    model.processed = FeatureProcessedEmbeddingBagCollection(
        collection, PositionWeightedModuleCollection({"t": 100})
    )
    assert types(one.plan(model, fr.fused_sharders()))["t"] not in OWNER_POOLED
    plan = planner(constraints=constraints).plan(model, fr.fused_sharders())
    assert types(plan)["t"] not in OWNER_POOLED


def test_a_zipf_law_says_how_many_rows_are_distinct() -> None:
    uniform = RowClasses.uniform(10**6)
    # With ids that are all alike, bags of two would have half as many rows again.
    few = TableLoad("t", 10**4, 64, 2.0, RowClasses.uniform(10**4))
    assert few.unique(4096) > 1.3 * few.distinct_bags(4096).bags and not owner_pools(few, 4096)
    assert owner_pools(TableLoad("t", 10**6, 64, 20.0, uniform), 4096)
    assert not owner_pools(TableLoad("t", 10**6, 64, 1.0, uniform), 4096)
    assert not owner_pools(TableLoad("t", 50, 64, 20.0, RowClasses.uniform(50)), 4096)
    assert not owner_pools(TableLoad("t", 10**6, 64, 20.0, uniform, pooled=False), 4096)


def test_a_profile_tells_bags_that_repeat() -> None:
    model, rows = bags(t=10_000), 10_000
    counts = np.full(rows, 3, np.int64)
    sizes = np.array([64, 256, 1024], np.int64)
    profile = AccessProfile(
        table_rows={"t": rows},
        samples=10_000,
        accesses={"t": 3 * rows},
        ids={"t": np.arange(rows)},
        counts={"t": counts},
        error=0,
        counters=1 << 20,
    )
    one = fr.FusedShardingPlanner(batch_size=1024, cluster=quick(2), profile=profile)
    one.plan(model, fr.fused_sharders())
    assert one.decision is not None
    (load,) = one.decision.tables
    assert load.distinct_bags(1024).bags == pytest.approx(1024)  # by chance
    distinct = np.minimum(sizes, 50)
    counted = CountedBags(sizes, np.ones(3, np.int64), distinct, 3 * distinct, 1344, 1344, 4032)
    knows = fr.FusedShardingPlanner(
        batch_size=1024, cluster=quick(2), profile=replace(profile, bags={"t": counted})
    )
    knows.plan(model, fr.fused_sharders())
    assert knows.decision is not None
    (load,) = knows.decision.tables
    assert load.distinct_bags(1024).bags == pytest.approx(50)
    assert knows.decision.systems[0] in OWNER_POOLED


def test_a_plan_file_is_the_plan(tmp_path: Path) -> None:
    model, sharders = bags(one=10**5, long=10**6, wide=10**6), fr.fused_sharders()
    constraints = pooling(long=20.0, wide=20.0) | {
        "wide": ParameterConstraints(
            pooling_factors=[20.0], sharding_types=["fused_column_wise"]
        )
    }  # fmt: skip
    one = fr.FusedShardingPlanner(batch_size=512, cluster=quick(4), constraints=constraints)
    plan = one.plan(model, sharders)
    assert types(plan)["one"] == FUSED and types(plan)["wide"] == FUSED_COLUMN_WISE
    write_plan(tmp_path / "plan.yaml", *plan_file_of(plan, 4, 4, "cpu"))
    assert sharding_plan_of(*read_plan(tmp_path / "plan.yaml"), model, sharders) == plan
    options = {option.name: option for option in one.get_selected_options()}
    assert one.decision is not None
    assert sum(s.perf.total for o in options.values() for s in o.shards if s.perf) > 0
    for name, entry in plan.plan["bags"].items():
        assert [shard.rank for shard in options[name].shards] == entry.ranks
