"""What the search picks, beside every plan that shards all tables alike, by the same prices."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fusedrec_torchrec.access.row_classes import RowClasses
from fusedrec_torchrec.bench.suite import MLPERF_SIZES
from fusedrec_torchrec.planner.cost.cluster import ClusterConfig, LinkConfig, RatesConfig
from fusedrec_torchrec.planner.cost.step import fused_step, stock_step
from fusedrec_torchrec.planner.cost.table_load import TableLoad
from fusedrec_torchrec.planner.search.decide import decide
from fusedrec_torchrec.planner.search.decision import Decision
from fusedrec_torchrec.planner.search.search_config import HotSearchConfig, SearchConfig
from fusedrec_torchrec.sharding.sharding_type import (
    FUSED,
    FUSED_COLUMN_WISE,
    FUSED_TABLE_WISE,
    OWNER_POOLED,
    SHARDINGS,
)
from tests.planner.search.test_decide import profiled, table

ALIKE = tuple(system for system in SHARDINGS if system != "data_parallel")
ROUNDING = 1 + 1e-9
LPT = 4 / 3  # of the best placement, that of the largest first is never worse (Graham 1969)
GRANULE = 1.01  # of prices, messages are rounded up to whole granules


@st.composite
def loads(draw: st.DrawFn) -> list[TableLoad]:
    known = draw(st.booleans())  # whether a profile says which rows are used
    tables = []
    for t in range(draw(st.integers(1, 5))):
        rows = int(10 ** draw(st.floats(0.5, 3.5 if known else 6.0)))
        dim = draw(st.sampled_from([4, 16, 64, 128]))
        pooling = draw(st.sampled_from([0.5, 1.0, 2.0, 7.0, 30.0]))
        zipf = draw(st.sampled_from([0.0, 0.8, 1.05, 1.3]))
        if known:
            counts = (1e5 / np.arange(1, rows + 1) ** zipf).astype(np.int64) + 1
            load = profiled(f"t{t}", counts, dim, pooling)
        else:
            load = table(f"t{t}", rows, dim, pooling, zipf)
        tables.append(replace(load, pooled=draw(st.integers(0, 9)) > 0))
    return tables


@st.composite
def clusters(draw: st.DrawFn) -> ClusterConfig:
    ranks, power = draw(st.integers(2, 8)), st.floats(-1, 1)
    step, table_price = draw(st.sampled_from([0.0, 200.0])), draw(st.sampled_from([0.0, 20.0]))
    return ClusterConfig(
        device="cpu",
        ranks=ranks,
        ranks_per_node=ranks,
        memory=draw(st.sampled_from([100.0, 0.1])),
        within_node=LinkConfig(
            all_to_all=10 ** draw(power), latency=draw(st.sampled_from([0.0, 50.0]))
        ),
        fused=RatesConfig(
            step=step,
            ids=50 * 10 ** draw(power),
            lookup=5 * 10 ** draw(power),
            bucket=draw(st.sampled_from([0.0, 100.0])),
        ),
        stock=RatesConfig(step=step, table=table_price, ids=50 * 10 ** draw(power)),
    )


def alike(tables: list[TableLoad], batch: int, cluster: ClusterConfig) -> dict[str, Decision]:
    """Returns the plans of tables that are all sharded in the same way, as far as they fit."""
    plans: dict[str, Decision] = {}
    for system in ALIKE:
        try:
            plans[system] = decide(tables, batch, cluster, SearchConfig(systems=[system]))
        except ValueError:
            continue
    return plans


@settings(max_examples=12)
@given(loads(), clusters(), st.sampled_from([16, 256, 2048]))
def test_no_plan_without_a_mix_is_shorter(
    tables: list[TableLoad], cluster: ClusterConfig, batch: int
) -> None:
    plans = alike(tables, batch, cluster)
    try:
        found = decide(tables, batch, cluster)
    except ValueError:
        assert not plans
        return
    assert found.fits
    for system, plan in plans.items():
        assert found.seconds <= plan.seconds * ROUNDING, system


@settings(max_examples=12)
@given(loads(), clusters(), st.sampled_from([16, 256, 2048]))
def test_plain_steps_without_a_search_are_not_shorter(
    tables: list[TableLoad], cluster: ClusterConfig, batch: int
) -> None:
    """Tables dealt to ranks in turn, or rows split evenly: nothing that the search has decided."""
    cluster, ranks = replace(cluster, memory=100.0), cluster.ranks
    found = decide(tables, batch, cluster).seconds
    pooled = all(load.pooled for load in tables)
    in_turn = [(t % ranks,) for t in range(len(tables))]
    steps = [fused_step(tables, batch, ranks)]
    if pooled:
        steps.append(fused_step(tables, batch, ranks, owners=in_turn))
        dims = {load.dim % (4 * ranks) for load in tables}
        if dims == {0}:
            all_ranks = [range(ranks)] * len(tables)
            steps.append(fused_step(tables, batch, ranks, owners=all_ranks))
            steps.append(stock_step("column_wise", tables, batch, ranks))
        first = [t for (t,) in in_turn]
        steps.append(stock_step("table_wise", tables, batch, ranks, first))
        steps.append(stock_step("row_wise", tables, batch, ranks))
    for step in steps:
        assert found <= step.seconds(cluster) * (1 + 2e-3), step.system


@settings(max_examples=20)
@given(
    st.lists(st.sampled_from([1.0, 2.0, 3.0, 5.0, 8.0, 27.0, 100.0]), min_size=2, max_size=20),
    st.integers(2, 8),
    st.sampled_from([FUSED_TABLE_WISE, "table_wise"]),
)
def test_whole_tables_are_balanced(poolings: list[float], ranks: int, system: str) -> None:
    """The busiest rank has no more than the bound of placing the largest table first."""
    tables = [table(f"t{t}", 10**6, 16, pooling) for t, pooling in enumerate(poolings)]
    lookup = RatesConfig(step=0.0, table=0.0, lookup=0.1)  # which alone takes time
    link = LinkConfig(all_to_all=1e3, latency=0.0)
    cluster = ClusterConfig(
        device="cpu", ranks=ranks, ranks_per_node=ranks, memory=1e3,
        within_node=link, fused=replace(lookup, bag_lookup=0.1, bag_ids=1e6), stock=lookup,
    )  # fmt: skip
    found = decide(tables, 256, cluster, SearchConfig(systems=[system]))  # type: ignore[list-item]
    (step,) = found.steps
    of_lookup = ("lookup", "bag_lookup")  # of the first ids of bags, and of the others
    work_W = sum(stage.amount_W for stage in step.stages if stage.name in of_lookup)
    assert isinstance(work_W, np.ndarray)
    one = 256 * ranks * 16 * 4  # bytes of one id in a bag, of all ranks
    work = sorted((one * pooling for pooling in poolings), reverse=True)
    least = max(work[0], sum(work) / ranks, sum(work[ranks - 1 : ranks + 1]) if work[ranks:] else 0)
    assert work_W.sum() == pytest.approx(sum(work), rel=1e-3)
    assert work_W.max() <= LPT * least * GRANULE


ROWS = (
    *(1460, 583, 10_131_227, 2_202_608, 305, 24, 12_517, 633, 3, 93_145, 5683, 8_351_593, 3194),
    *(27, 14_992, 5_461_306, 10, 5652, 2173, 4, 7_046_547, 18, 15, 286_181, 105, 142_572),
)


def criteo(zipf: float = 1.05) -> list[TableLoad]:
    """Returns Criteo's tables with the bags of MLPerf."""
    return [
        TableLoad(f"t{t}", rows, 64, float(size), RowClasses.zipf(rows, zipf))
        for t, (rows, size) in enumerate(zip(ROWS, MLPERF_SIZES, strict=True))
    ]


def test_mlperf_is_not_longer_than_tables_that_are_alike() -> None:
    """Many tables have more bags than rows in a batch, and owners had better pool them."""
    cluster = ClusterConfig(
        device="cpu",
        ranks=2,
        ranks_per_node=64,
        memory=100.0,
        within_node=LinkConfig(all_to_all=1.5, all_reduce=1.0, latency=120.0),
        fused=RatesConfig(
            step=2500.0, ids=30.0, lookup=4.0, pooling=6.0, bucket=200.0, bag_ids=100.0,
            bag_lookup=40.0,
        ),
        stock=RatesConfig(step=4000.0, table=40.0, ids=20.0, lookup=3.0, pooling=2.0),
    )  # fmt: skip
    tables, search = criteo(), SearchConfig(hot=HotSearchConfig(memory=0.0))
    found = decide(tables, 8192, cluster, search)
    plans = alike(tables, 8192, cluster)
    assert set(plans) == set(ALIKE)
    assert found.seconds <= min(plan.seconds for plan in plans.values()) * ROUNDING
    more_bags = [t for t, load in enumerate(tables) if load.has_more_bags(8192)]
    assert any(found.systems[t] in OWNER_POOLED for t in more_bags)
    by_rows = plans[FUSED].seconds
    assert plans[FUSED_TABLE_WISE].seconds < by_rows > plans[FUSED_COLUMN_WISE].seconds


def test_many_tables_are_not_longer_than_tables_that_are_alike() -> None:
    """Too many to start from every sharding, or to move at exact prices."""
    random = np.random.default_rng(0)
    tables = [
        table(
            f"t{t}",
            int(float(f"{10 ** random.uniform(2, 6):.1g}")),
            int(random.choice([64, 128])),
            float(random.choice([1, 1, 10, 50])),
        )
        for t in range(45)
    ]
    for ranks in (4, 32):
        cluster = ClusterConfig(device="cpu", ranks=ranks, ranks_per_node=8, memory=80.0)
        found = decide(tables, 512, cluster)
        for system, plan in alike(tables, 512, cluster).items():
            assert found.seconds <= plan.seconds * ROUNDING, (ranks, system)
