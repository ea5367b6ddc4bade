"""Models whose tables owners pool, as ``FusedShardingPlanner`` plans them."""

import logging
import re
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
from fusedrec_torchrec.planner.enumerator import SECOND_BEST, SECOND_BEST_COUNTED
from fusedrec_torchrec.sharding.plan_conversion import plan_file_of, sharding_plan_of
from fusedrec_torchrec.sharding.plan_file import read_plan, write_plan
from fusedrec_torchrec.sharding.sharding_type import (
    FUSED,
    FUSED_COLUMN_WISE,
    FUSED_TABLE_WISE,
    FUSED_TYPES,
    OWNER_POOLED,
)
from tests.planner.search.test_decide import quick
from tests.planner.test_planner import Model, only, planner, types


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
    few = [f"few{t}" for t in range(6)]
    model = bags(one=10**6, long=10**6, two=10**4, **dict.fromkeys(few, 50))
    constraints = pooling(long=20.0, two=2.0, **dict.fromkeys(few, 20.0))
    one = planner(constraints=constraints, batch_size=4096)
    found = types(one.plan(model, fr.fused_sharders()))
    assert {found[name] for name in few} == {FUSED} and found["two"] == FUSED
    assert found["long"] in OWNER_POOLED
    assert found["one"] in OWNER_POOLED, "as many bags as rows: as the others that owners pool"


def test_without_a_cluster_owners_pool_all_tables_if_not_many_more_rows_travel() -> None:
    model = bags(one=10**6, long=10**6, few=50, two=10**4)
    constraints = pooling(long=20.0, few=20.0, two=2.0)
    planned = planner(constraints=constraints, batch_size=4096).plan(model, fr.fused_sharders())
    assert set(types(planned).values()) <= set(OWNER_POOLED)


def test_without_a_cluster_requesters_pool_where_bags_have_one_id() -> None:
    model = bags(a=10**6, b=50, c=10**4)
    assert set(types(planner().plan(model, fr.fused_sharders())).values()) == {FUSED}


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


def counted_profile(distinct_bags: dict[str, int], rows: int, used: int) -> AccessProfile:
    """Bags of 3 ids; each table uses some of its rows, all alike, in batches of 1024 samples."""
    sizes = np.array([64, 256, 1024], np.int64)
    bags_of = {}
    for name, most in distinct_bags.items():
        distinct = np.minimum(sizes, most)
        bags_of[name] = CountedBags(
            sizes, np.ones(3, np.int64), distinct, 3 * distinct, 1344, 1344, 4032
        )
    return AccessProfile(
        table_rows=dict.fromkeys(distinct_bags, rows),
        samples=1024,
        accesses=dict.fromkeys(distinct_bags, 3 * 1024),
        ids=dict.fromkeys(distinct_bags, np.arange(used)),
        counts=dict.fromkeys(distinct_bags, np.full(used, 3 * 1024 // used, np.int64)),
        error=0,
        counters=1 << 20,
        bags=bags_of,
    )


def test_a_profile_decides_who_pools_without_a_cluster() -> None:
    """The same tables, whose batches have about 512 distinct rows; bags repeat, or they do not."""
    model, sharders = bags(few=10**5, many=10**5), fr.fused_sharders()
    profile = counted_profile({"few": 20, "many": 1024}, rows=10**5, used=512)
    plan = planner(profile=profile, batch_size=1024).plan(model, sharders)
    assert types(plan)["few"] in OWNER_POOLED and types(plan)["many"] == "fused_row_wise"
    profile = counted_profile({"few": 20, "many": 30}, rows=10**5, used=512)
    assert {*types(planner(profile=profile, batch_size=1024).plan(model, sharders)).values()} <= {
        *OWNER_POOLED
    }
    profile = counted_profile({"few": 1024, "many": 1024}, rows=10**5, used=512)
    assert {*types(planner(profile=profile, batch_size=1024).plan(model, sharders)).values()} == {
        "fused_row_wise"
    }
    # What a user says about a table goes before, and other tables are another model's.
    asked = {"few": ParameterConstraints(sharding_types=["fused_row_wise"])}
    profile = counted_profile({"few": 20, "many": 30}, rows=10**5, used=512)
    plan = planner(profile=profile, constraints=asked, batch_size=1024).plan(model, sharders)
    assert types(plan)["few"] == "fused_row_wise" and types(plan)["many"] in OWNER_POOLED
    with pytest.raises(ValueError, match="profile"):
        planner(profile=profile, batch_size=1024).plan(bags(other=10**5), sharders)


@pytest.mark.parametrize(
    "constraint",
    [
        {"compute_kernels": ["fused"]},
        {"pooling_factors": [3.0]},
        {"sharding_types": [*OWNER_POOLED, FUSED]},
    ],
    ids=str,
)
def test_a_profile_counts_whatever_else_constraints_say(constraint: dict[str, Any]) -> None:
    """TorchRec's constraints have a pooling factor of 1 if nobody gives them one."""
    model, sharders = bags(few=10**5, many=10**5), fr.fused_sharders()
    profile = counted_profile({"few": 20, "many": 30}, rows=10**5, used=512)
    constraints = {name: ParameterConstraints(**constraint) for name in ("few", "many")}
    one = planner(profile=profile, constraints=constraints, batch_size=1024)
    assert {*types(one.plan(model, sharders)).values()} <= {*OWNER_POOLED}


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_tables_that_can_be_fused_are_data_parallel_only_if_asked(ranks: int) -> None:
    rows = {"heavy": 50_000, **{f"t{i}": 10**5 for i in range(12)}}
    constraints = pooling(heavy=100.0, **{f"t{i}": 2.0 for i in range(12)})
    one = planner(ranks, constraints=constraints, batch_size=2048)
    assert {*types(one.plan(bags(**rows), fr.fused_sharders())).values()} <= {*FUSED_TYPES}
    constraints["heavy"].sharding_types = ["data_parallel"]
    one = planner(ranks, constraints=constraints, batch_size=2048)
    assert types(one.plan(bags(**rows), fr.fused_sharders()))["heavy"] == "data_parallel"


def test_a_profile_tells_how_long_bags_are_for_the_balance_of_ranks() -> None:
    """Estimates of all options go by it, and the search by them."""
    names = ["long", "a", "b", "c", "d"]
    profile = counted_profile(dict.fromkeys(names, 20), rows=10**5, used=512)
    accesses = {**profile.accesses, "long": 4 * profile.accesses["long"]}
    counts = {**profile.counts, "long": 4 * profile.counts["long"]}
    profile = replace(profile, accesses=accesses, counts=counts)
    one = planner(profile=profile, batch_size=1024)
    plan = one.plan(bags(**dict.fromkeys(names, 10**5)), fr.fused_sharders())
    assert {option.name: option.input_lengths for option in one.get_selected_options()} == {
        "long": [12.0],
        **{name: [3.0] for name in "abcd"},
    }
    assert {*types(plan).values()} <= {*OWNER_POOLED}


def test_a_profile_tells_which_bags_repeat_for_the_balance_of_ranks() -> None:
    """Tables of equal bags, of which some are pooled 1024 times and others 8 times."""
    bags_of = {"many0": 1024, "few0": 8, "many1": 1024, "few1": 8}
    profile = counted_profile(bags_of, rows=10**5, used=3072)
    model = bags(**dict.fromkeys(bags_of, 10**5))
    constraints = only(**dict.fromkeys(bags_of, FUSED_TABLE_WISE))
    one = planner(profile=profile, batch_size=1024, constraints=constraints)
    plan: Any = one.plan(model, fr.fused_sharders()).plan["bags"]
    assert plan["many0"].ranks != plan["many1"].ranks
    perf = {option.name: option.total_perf for option in one.get_selected_options()}
    assert perf["many0"] == perf["many1"] > 10 * perf["few0"] == 10 * perf["few1"]


@pytest.mark.parametrize("dim", [8, 64, 128])
@pytest.mark.parametrize("length", [1.0, 2.0, 20.0])
def test_stock_shardings_are_not_chosen_where_fused_ones_are_allowed(
    length: float, dim: int
) -> None:
    """TorchRec's estimators count otherwise than ours, so that stock ones can look faster."""
    allowed = [*FUSED_TYPES, "table_wise", "row_wise", "column_wise"]
    constraints = {
        name: ParameterConstraints(
            sharding_types=allowed, compute_kernels=["fused"], pooling_factors=[factor]
        )
        for name, factor in {"long": length, "short": 1.0}.items()
    }
    one = planner(constraints=constraints, batch_size=1024)
    plan = one.plan(bags(dim, long=10**6, short=10**4), fr.fused_sharders())
    assert {*types(plan).values()} <= {*FUSED_TYPES}


def test_weights_of_bags_travel_without_a_cluster_too() -> None:
    def sent(weighted: bool) -> float:
        config = EmbeddingBagConfig(
            name="t", num_embeddings=10**6, embedding_dim=64, feature_names=["t"]
        )
        meta = torch.device("meta")
        model = EmbeddingBagCollection([config], is_weighted=weighted, device=meta)
        constraints = {
            "t": ParameterConstraints(sharding_types=[FUSED_TABLE_WISE], pooling_factors=[20.0])
        }
        one = planner(constraints=constraints, batch_size=64)
        one.plan(model, fr.fused_sharders())
        (option,) = one.get_selected_options()
        return option.shards[0].perf.input_dist_comms

    assert sent(weighted=True) / sent(weighted=False) == pytest.approx(41 / 21)


def test_whoever_says_nothing_of_bags_is_told_what_is_assumed(
    caplog: pytest.LogCaptureFixture,
) -> None:
    model, sharders = bags(a=100, b=100, c=100, d=100, e=100), fr.fused_sharders()
    planner(constraints=pooling(b=2.0)).plan(model, sharders)
    (text,) = [record.getMessage() for record in caplog.records if "nobody" in record.msg]
    assert "a bag of 'a', 'c', 'd' and 1 more has" in text
    assert "constraints={'a': ParameterConstraints(pooling_factors=[10.0]), ...}" in text
    caplog.clear()
    planner(constraints=pooling(**dict.fromkeys("abcde", 1.0))).plan(model, sharders)
    profile = counted_profile(dict.fromkeys("abcde", 20), rows=100, used=50)
    planner(profile=profile).plan(model, sharders)
    assert "nobody" not in caplog.text


def test_statistics_say_which_fused_sharding_a_table_has_and_why(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, logger="fusedrec_torchrec.planner.report.stats")
    profile = counted_profile({"few": 20, "many": 1024}, rows=10**5, used=512)
    model, sharders = bags(few=10**5, many=10**5), fr.fused_sharders()
    plan = planner(profile=profile, batch_size=1024).plan(model, sharders)
    kind = types(plan)["few"]
    assert f"bags.few: {kind}, 20 distinct bags are fewer than 5" in caplog.text
    assert re.search(r"bags.many: fused_row_wise, 5\d\d distinct rows are no more", caplog.text)
    assert "Zipf" not in caplog.text
    caplog.clear()
    planner(constraints=only(few=FUSED, many=FUSED_COLUMN_WISE)).plan(model, sharders)
    assert "if rows are used by a Zipf law" in caplog.text
    assert "bags.many: fused_column_wise, constraints: " in caplog.text


def test_balance_is_no_reason_to_send_more_only_where_bags_were_counted() -> None:
    """A law, or a profile of an older file, knows how often rows come, not which bags repeat."""
    profile = counted_profile({"t": 20}, rows=10**5, used=512)

    def times_slower(**known: Any) -> float:
        """Of the way of pooling that sends more, to the other's time."""
        one = planner(batch_size=1024, **known)
        options = one._enumerator.enumerate(bags(t=10**5), fr.fused_sharders())
        times: dict[bool, list[float]] = {True: [], False: []}
        for option in options:
            if option.sharding_type in FUSED_TYPES:
                times[option.sharding_type in OWNER_POOLED].append(option.total_perf)
        less, more = sorted(times.values(), key=max)
        return min(more) / max(less)

    assert times_slower(profile=profile) >= SECOND_BEST_COUNTED * (1 - 1e-9)
    for known in ({"profile": replace(profile, bags={})}, {"zipf": 1.05}):
        slower = times_slower(**known, constraints=pooling(t=3.0))
        assert SECOND_BEST * (1 - 1e-9) <= slower < SECOND_BEST_COUNTED / 4, known


def test_a_zipf_law_decides_who_pools_without_a_cluster() -> None:
    """A steep law has fewer rows than bags, where the one that is assumed has more."""
    model, sharders, constraints = bags(t=10**6), fr.fused_sharders(), pooling(t=3.0)
    assert types(planner(constraints=constraints).plan(model, sharders))["t"] in OWNER_POOLED
    steep = planner(constraints=constraints, zipf=2.0).plan(model, sharders)
    assert types(steep)["t"] == "fused_row_wise"


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
