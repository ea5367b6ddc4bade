"""The price by which the planner replicates rows: that of its step, and that of hot rows' rule."""

from pathlib import Path

import numpy as np
import pytest

from fusedrec_torchrec.access.access_profile import AccessProfile
from fusedrec_torchrec.access.row_classes import RowClasses, RowPlaces
from fusedrec_torchrec.exchange.buckets import BucketedTables, group_into_buckets
from fusedrec_torchrec.hot.choose import choose
from fusedrec_torchrec.hot.cost import CostOptions, RowUse, seconds_of_prefixes
from fusedrec_torchrec.hot.options import HotOptions, HotRule
from fusedrec_torchrec.planner.cost.cluster import ClusterConfig, LinkConfig, RatesConfig
from fusedrec_torchrec.planner.cost.step import HotUse, fused_step
from fusedrec_torchrec.planner.cost.table_load import TableLoad
from fusedrec_torchrec.planner.search.replicate import Ranking, price
from tests.exchange.tables import sharded_tables

NEAR = LinkConfig(all_to_all=100.0, all_reduce=200.0, latency=10.0)
FAR = LinkConfig(all_to_all=10.0, all_reduce=30.0, latency=30.0, peer=1.0)


@pytest.mark.parametrize("ranks", [1, 2, 16])
@pytest.mark.parametrize("exact_counts", [False, True])
def test_it_is_the_time_of_the_step(ranks: int, exact_counts: bool) -> None:
    cluster = ClusterConfig(
        ranks=ranks, ranks_per_node=8, within_node=NEAR, between_nodes=FAR, hidden=0.3
    )
    tables = [
        TableLoad("a", 1000, 8, 1.0, RowClasses.zipf(1000, 1.1)),
        TableLoad("b", 5000, 64, 2.0, RowClasses.zipf(5000, 0.8)),
    ]
    ways = set()
    for hot in (None, *(HotUse(np.array([10, n]), k) for n in (5, 5000) for k in (1, 8))):
        step = fused_step(tables, 128, ranks, exact_counts=exact_counts, hot=hot)
        assert price(step, cluster) == pytest.approx(step.seconds(cluster), rel=1e-12)
        ways |= {stage.kind for stage in step.stages if stage.name == "hot_sync"}
    assert ways == ({"all_to_all", "all_reduce"} if ranks > 2 else {"all_to_all"})


@pytest.mark.parametrize("sync_every", [1, 8])
@pytest.mark.parametrize("batch", [100, 5000])
def test_it_is_that_of_the_rule_if_only_links_take_time(batch: int, sync_every: int) -> None:
    rows, ranks = 2000, 4
    free = RatesConfig(step=0, table=0, ids=1e12, lookup=1e12, pooling=1e12, hot=1e12)
    link = LinkConfig(all_to_all=1.0, all_reduce=3.0, latency=20.0)
    cluster = ClusterConfig(ranks=ranks, within_node=link, hidden=0.25, fused=free)
    options = CostOptions(
        batch_size=batch,
        all_to_all_bandwidth=1e9,
        all_reduce_bandwidth=3e9,
        latency=20e-6,
        hidden=0.25,
    )
    table = TableLoad("a", rows, 64, 1.0, RowClasses.uniform(rows))
    use = RowUse(
        uses_R=np.full(rows, 1 / rows),
        bytes_R=np.full(rows, 256),
        owner_R=np.arange(rows) % ranks,
        table_R=np.zeros(rows, np.int64),
        uses_per_table=np.ones(1),
        rest_requests=0.0,
        rest_bytes=0.0,
    )
    rule = seconds_of_prefixes(use, ranks, options, sync_every, hot_batches=False)
    for hot in (0, 400, 2000):
        replicas = HotUse(np.array([hot]), sync_every) if hot else None
        step = fused_step([table], batch, ranks, exact_counts=True, hot=replicas)
        counts = next(stage for stage in step.stages if stage.name == "counts")
        seconds = price(step, cluster) - counts.seconds(cluster, free)
        assert seconds == pytest.approx(rule[hot], rel=1e-6)


def test_planner_and_rule_replicate_the_same_row_first(tmp_path: Path) -> None:
    """A row of bags of ten ids is used more often here than another, but is in fewer batches."""
    ids, rows, ranks = np.zeros(1, np.int64), 100, 8
    profile = AccessProfile(
        table_rows={"bags": rows, "single": rows},
        samples=1000,
        accesses={"bags": 10_000, "single": 1000},
        ids={"bags": ids, "single": ids},
        counts={"bags": np.array([510]), "single": np.array([500])},
        error=0,
        counters=10,
    )
    assert profile.ranking(["bags", "single"])[0].tolist() == [0, 1]
    tables = [
        TableLoad(
            name,
            rows,
            8,
            profile.accesses[name] / profile.samples,
            RowClasses.counted(profile, name),
            places=RowPlaces.counted(profile, name),
        )
        for name in profile.table_rows
    ]
    assert list(Ranking(tables, batch=1).ids(1)) == ["single"]
    profile.save(tmp_path / "p.npz")
    options = HotOptions(
        rule=HotRule(cost_model=True),
        profile=tmp_path / "p.npz",
        # A replica costs more than the row of the bags saves, and less than the other.
        cost=CostOptions(
            batch_size=1,
            all_to_all_bandwidth=1e9,
            all_reduce_bandwidth=2.9e8,
            latency=0.0,
            hidden=0.0,
        ),
    )
    starts = np.linspace(0, rows, ranks + 1).astype(int).tolist()
    sharded = sharded_tables([{"name": name} for name in profile.table_rows], [starts, starts])
    chosen = choose(options, BucketedTables(group_into_buckets(sharded)))
    assert chosen is not None
    assert [ids.tolist() for ids in chosen.ids] == [[], [0]]
