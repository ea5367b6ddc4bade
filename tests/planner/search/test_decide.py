"""Decisions: near the optimum where it can be found by trying, and right where it is obvious."""

import itertools
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
from numpy.typing import NDArray

from fusedrec_torchrec.access.access_profile import AccessProfile
from fusedrec_torchrec.access.row_classes import RowClasses, RowPlaces
from fusedrec_torchrec.codecs.options import CodecOptions, Codecs
from fusedrec_torchrec.planner.cost.cluster import ClusterConfig, LinkConfig, RatesConfig
from fusedrec_torchrec.planner.cost.step import HotUse, fused_step
from fusedrec_torchrec.planner.cost.table_load import TableLoad
from fusedrec_torchrec.planner.search.decide import decide, groups_of
from fusedrec_torchrec.planner.search.decision import Decision
from fusedrec_torchrec.planner.search.search_config import (
    GroupsConfig,
    HotSearchConfig,
    SearchConfig,
)
from fusedrec_torchrec.sharding.sharding_type import FUSED, FUSED_COLUMN_WISE, FUSED_TABLE_WISE

BATCH = 512
NEAR = 1.02  # of the optimum


def table(
    name: str,
    rows: int = 1000,
    dim: int = 64,
    pooling: float = 1.0,
    zipf: float = 0.0,
    **others: object,
) -> TableLoad:
    classes = RowClasses.zipf(rows, zipf) if zipf else RowClasses.uniform(rows)
    return TableLoad(name, rows, dim, pooling, classes, **others)  # type: ignore[arg-type]


def profiled(
    name: str, counts: NDArray[np.int64], dim: int = 64, pooling: float = 1.0
) -> TableLoad:
    """A table whose row i was used counts[i] times."""
    order = np.argsort(-counts, kind="stable")
    used = order[counts[order] > 0]
    accesses = int(counts.sum())
    profile = AccessProfile(
        table_rows={name: len(counts)},
        samples=accesses,
        accesses={name: accesses},
        ids={name: used},
        counts={name: counts[used]},
        error=0,
        counters=1 << 20,
    )
    return TableLoad(
        name,
        len(counts),
        dim,
        pooling,
        RowClasses.counted(profile, name),
        places=RowPlaces.counted(profile, name),
    )


def quick(ranks: int, **settings: object) -> ClusterConfig:
    """A cluster without fixed costs."""
    free = RatesConfig(step=0.0, table=0.0)
    base = ClusterConfig(
        device="cpu",
        ranks=ranks,
        ranks_per_node=ranks,
        within_node=LinkConfig(all_to_all=1.0, all_reduce=1.0, latency=0.0),
        fused=free,
        stock=free,
    )
    return replace(base, **settings)  # type: ignore[arg-type]


FREE = RatesConfig(step=0.0, table=0.0, ids=1e6, lookup=1e6, pooling=1e6)
"""Work that takes no time, so that bytes decide."""


# ---------------------------------------------------------------- near the optimum


def random_problem(seed: int) -> tuple[list[TableLoad], ClusterConfig]:
    random = np.random.default_rng(seed)
    ranks, tables = int(random.choice([2, 3, 4])), int(random.integers(2, 5))
    loads = []
    for t in range(tables):
        rows, dim = int(10 ** random.uniform(1, 5)), int(random.choice([16, 64, 128]))
        pooling, zipf = float(random.choice([1, 5, 40])), float(random.choice([0, 0.8, 1.1]))
        loads.append(table(f"t{t}", rows, dim, pooling, zipf))
    step, latency = float(random.choice([0, 20, 200])), float(random.choice([0, 20, 100]))
    return loads, ClusterConfig(
        device="cpu",
        ranks=ranks,
        ranks_per_node=ranks,
        within_node=LinkConfig(all_to_all=float(10 ** random.uniform(-1, 1)), latency=latency),
        fused=RatesConfig(step=step, ids=float(10 ** random.uniform(0.5, 2))),
        stock=RatesConfig(step=step, table=float(random.choice([0, 5]))),
    )


def all_plans(tables: list[TableLoad], cluster: ClusterConfig) -> Iterator[Decision]:
    """Every way to shard every table, ids by both input dists; rows split evenly."""
    ranks = cluster.ranks
    options = []
    for load in tables:
        ways: list[tuple[str, tuple[int, ...]]] = [(FUSED, ()), ("row_wise", ())]
        whole: list[tuple[str, tuple[int, ...]]] = [
            (FUSED_TABLE_WISE, (rank,)) for rank in range(ranks)
        ]
        ways += whole
        splits = sorted({n for n in (2, ranks) if load.dim % (4 * n) == 0})
        for split in splits:
            starts = range(0, ranks - split + 1, 1 if ranks < 4 else 2)
            ways += [(FUSED_COLUMN_WISE, tuple(range(r, r + split))) for r in starts]
        options.append(ways)
    groups, _ = groups_of(cluster, GroupsConfig())[0]
    for chosen in itertools.product(*options):
        for exact in (False, True):
            yield Decision(
                tables=tuple(tables),
                batch=BATCH,
                cluster=cluster,
                groups=groups,
                systems=tuple(system for system, _ in chosen),
                owners=tuple(owner for _, owner in chosen),
                on_host=(False,) * len(tables),
                exact_counts=exact,
            )


@pytest.mark.parametrize("seed", [*range(8), 138])  # 138 needs two tables moved at a time
def test_shardings_are_near_the_optimum(seed: int) -> None:
    tables, cluster = random_problem(seed)
    search = SearchConfig(row_ranges="even")
    best = min(plan.seconds for plan in all_plans(tables, cluster))
    assert decide(tables, BATCH, cluster, search).seconds <= NEAR * best


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(100, 200))
def test_shardings_are_near_the_optimum_of_many(seed: int) -> None:
    test_shardings_are_near_the_optimum(seed)


def test_the_problems_are_not_all_alike() -> None:
    """Or nearness to the optimum would say little."""
    kinds = set()
    for seed in range(8):
        tables, cluster = random_problem(seed)
        kinds.add(frozenset(decide(tables, BATCH, cluster).systems))
    assert len(kinds) >= 3 and any(len(kind) > 1 for kind in kinds)


@pytest.mark.parametrize("all_reduce", [1.0, 4.0, 20.0])
@pytest.mark.parametrize("skew", [0.9, 1.4])
def test_hot_rows_are_near_the_optimum(all_reduce: float, skew: float) -> None:
    """Of all numbers of hot rows in the order of use."""
    rows = 300
    counts = (1e5 / np.arange(1, rows + 1) ** skew).astype(np.int64)
    random = np.random.default_rng(0)
    tables = [profiled(f"t{t}", random.permutation(counts)) for t in range(2)]
    link = LinkConfig(all_to_all=1.0, all_reduce=all_reduce, latency=1.0)
    cluster = quick(4, within_node=link, fused=RatesConfig(step=0.0, table=0.0, hot=1e6))
    search = SearchConfig(systems=["fused_row_wise"], row_ranges="even", input_dist="single_shot")
    found = decide(tables, 256, cluster, search)
    flat = [replace(each, places=None) for each in tables]
    best = min(
        fused_step(flat, 256, 4, hot=HotUse(np.array([a, b]))).seconds(cluster)
        for a in range(0, rows + 1, 3)
        for b in (a, min(a + 1, rows))
    )
    number = np.array([len(found.hot.get(each.name, ())) for each in tables])
    chosen = fused_step(flat, 256, 4, hot=HotUse(number)).seconds(cluster)
    assert chosen <= NEAR * best
    assert bool(number.any()) == (best < fused_step(flat, 256, 4).seconds(cluster) * 0.999)


def test_some_hot_rows_pay_and_some_do_not() -> None:
    counts = (1e5 / np.arange(1, 301) ** 1.4).astype(np.int64)
    tables = [profiled("a", counts)]
    cheap = LinkConfig(all_to_all=1.0, all_reduce=20.0, latency=1.0)
    rates = RatesConfig(step=0.0, table=0.0, hot=1e6)
    search = SearchConfig(systems=["fused_row_wise"])
    found = decide(tables, 256, quick(4, within_node=cheap, fused=rates), search)
    assert 0 < len(found.hot["a"]) < 300
    assert set(found.hot["a"]) == set(range(len(found.hot["a"])))  # the most used ones
    slow = LinkConfig(all_to_all=1.0, all_reduce=0.2, latency=1.0)
    assert not decide(tables, 256, quick(4, within_node=slow, fused=rates), search).hot


def test_groups_are_near_the_optimum() -> None:
    tables = [table(f"t{t}", 100_000, zipf=1.0) for t in range(10)]
    near = LinkConfig(all_to_all=100.0, all_reduce=100.0, latency=10.0)
    far = LinkConfig(all_to_all=2.0, all_reduce=2.0, latency=30.0, peer=50.0)
    cluster = ClusterConfig(
        device="cpu", ranks=64, ranks_per_node=8, within_node=near, between_nodes=far
    )
    free = SearchConfig(groups=GroupsConfig(sizes="all"))
    found = decide(tables, BATCH, cluster, free)
    each = [
        decide(tables, BATCH, cluster, SearchConfig(groups=GroupsConfig(sizes=[size]))).seconds
        for size in (1, 2, 4, 8, 16, 32)
    ]
    assert found.groups.number > 1 and found.seconds <= NEAR * min(each)
    assert decide(tables, BATCH, cluster).groups.number == 1  # unless it may


# ---------------------------------------------------------------- right where it is obvious


def test_pooling_at_the_owner_wins_for_bags_of_ids_that_differ() -> None:
    """The distinct rows of long bags are many more than bags, unless the same come again."""
    tables = [table(f"t{t}", 10**6, pooling=50.0) for t in range(4)]
    assert set(decide(tables, BATCH, quick(2)).systems) <= {FUSED_TABLE_WISE, FUSED_COLUMN_WISE}
    again = [table(f"t{t}", 100, pooling=50.0) for t in range(4)]
    assert set(decide(again, BATCH, quick(2, fused=FREE)).systems) == {FUSED}


def test_tables_that_stay_out_do_not_pay_twice() -> None:
    """A second kind of exchange has a price of its own."""
    tables = [*(table(f"t{t}", 500) for t in range(9)), table("long", 10**6, pooling=50.0)]
    cluster = quick(2)
    search = SearchConfig(systems=["fused_row_wise", "table_wise", "row_wise", "column_wise"])
    assert decide(tables, BATCH, cluster, search).systems[-1] != FUSED
    dear = replace(cluster, stock=RatesConfig(step=1e6, table=0.0))
    assert set(decide(tables, BATCH, dear, search).systems) == {FUSED}
    # All fused tables are one exchange, but owners that pool ask FBGEMM once more.
    systems = decide(tables, BATCH, dear).systems
    assert set(systems[:-1]) == {FUSED} and systems[-1] in (FUSED_TABLE_WISE, FUSED_COLUMN_WISE)
    dear = replace(cluster, fused=RatesConfig(step=0.0, table=0.0, bucket=1e6))
    found = decide(tables, BATCH, dear)
    assert [step.buckets for step in found.steps if step.system == FUSED] == [1]


def test_ids_travel_as_is_cheaper() -> None:
    tables = [table(f"t{t}", 10_000, dim=4) for t in range(8)]
    quick_link = LinkConfig(all_to_all=1.0, latency=0.0)
    slow_start = LinkConfig(all_to_all=1.0, latency=1000.0)
    # Slack is bytes, counts of their own are latency.
    assert decide(tables, 4096, quick(8, within_node=quick_link)).exact_counts
    assert not decide(tables, 4096, quick(8, within_node=slow_start)).exact_counts
    fixed = SearchConfig(input_dist="single_shot")
    assert not decide(tables, 4096, quick(8, within_node=quick_link), fixed).exact_counts


def test_rows_are_divided_by_load() -> None:
    """Popular rows at the beginning of a table do not end on one rank."""
    counts = (1e6 / np.arange(1, 20_001)).astype(np.int64)
    tables = [profiled(f"t{t}", counts) for t in range(3)]
    search = SearchConfig(systems=["fused_row_wise"], hot=HotSearchConfig(memory=0.0))
    even = decide(tables, BATCH, quick(4), replace(search, row_ranges="even"))
    balanced = decide(tables, BATCH, quick(4), search)
    assert balanced.ranges is not None and balanced.seconds < 0.8 * even.seconds
    (step,) = balanced.steps
    rows = next(stage for stage in step.stages if stage.name == "rows").amount_W
    assert rows.max() < 1.02 * rows.mean()
    for ranges in balanced.ranges:
        assert ranges[0] == 0 and ranges[-1] == 20_000 and (np.diff(ranges) >= 0).all()
        assert np.diff(ranges)[0] < 5000  # the popular end


def test_small_tables_do_not_all_begin_on_the_first_rank() -> None:
    tables = [table(f"t{t}", 3) for t in range(16)]
    search = SearchConfig(systems=["fused_row_wise"])
    found = decide(tables, BATCH, quick(8), search)
    (step,) = found.steps
    asked = next(stage for stage in step.stages if stage.name == "lookup").amount_W
    assert asked.max() < 1.2 * asked.mean()


def test_balance_gives_way_to_memory() -> None:
    counts = np.ones(100_000, np.int64)
    counts[:1000] = 10_000
    load = profiled("t", counts)
    room = 0.6 * load.size / 1e9
    search = SearchConfig(systems=["fused_row_wise"], hot=HotSearchConfig(memory=0.0))
    tight = decide([load], 64, quick(2, memory=room), search)
    loose = decide([load], 64, quick(2, memory=10.0), search)
    assert tight.memory_W.max() <= room * 1e9 < loose.memory_W.max()
    assert loose.seconds <= tight.seconds


def test_ids_travel_as_is_cheaper_with_rows_where_they_end_up() -> None:
    """Uneven load pads messages; once rows are balanced, padding is small."""
    counts = np.ones(20_000, np.int64)
    counts[:2000] = 5000
    load = profiled("t", counts, dim=4)
    search = SearchConfig(systems=["fused_row_wise"], hot=HotSearchConfig(memory=0.0))
    for latency in (5.0, 20.0, 50.0, 100.0):
        cluster = quick(4, within_node=LinkConfig(all_to_all=0.1, latency=latency))
        found = decide([load], 2048, cluster, search)
        other = replace(found, exact_counts=not found.exact_counts)
        assert found.seconds <= other.seconds * 1.0011


def test_a_lossy_codec_is_chosen_only_if_it_may() -> None:
    tables = [table(f"t{t}", 10_000) for t in range(4)]
    assert decide(tables, BATCH, quick(2)).codecs.are_exact
    lossy = decide(tables, BATCH, quick(2), SearchConfig(codecs=["fp16", "int8"]))
    assert (lossy.codecs.forward.type, lossy.codecs.backward.type) == ("int8", "int8")
    dct = Codecs(
        forward=CodecOptions(type="dct", density=0.05, values="bf16"),
        backward=CodecOptions(type="bf16"),
    )
    sparser = decide(tables, BATCH, quick(2), SearchConfig(codecs=["int8", dct]))
    assert sparser.codecs == dct
    assert sparser.bytes_sent < lossy.bytes_sent
    assert lossy.bytes_sent < 0.4 * decide(tables, BATCH, quick(2)).bytes_sent


def test_equal_input_equal_plan() -> None:
    tables, cluster = random_problem(3)
    first, second = (decide(tables, BATCH, cluster) for _ in range(2))
    assert (first.systems, first.owners, first.seconds) == (
        second.systems,
        second.owners,
        second.seconds,
    )


# ---------------------------------------------------------------- memory


def test_a_table_that_does_not_fit_is_named() -> None:
    tables = [table("small"), table("huge", 10**9)]
    with pytest.raises(ValueError, match=r"table 'huge' does not fit.* are missing"):
        decide(tables, BATCH, quick(4, memory=20.0))


def test_whole_tables_go_where_there_is_room() -> None:
    tables = [table(f"t{t}", 10**6, pooling=50.0) for t in range(4)]
    size = tables[0].size / 1e9
    search = SearchConfig(systems=["table_wise"])
    found = decide(tables, BATCH, quick(2, memory=2.5 * size), search)
    assert sorted(found.owners) == [(0,), (0,), (1,), (1,)]
    assert found.memory_W.max() <= 2.5 * size * 1e9
    alone = decide(tables[:1], BATCH, quick(2, memory=2.5 * size), search)
    bags = BATCH * tables[0].dim * 4
    ((rank,),) = alone.owners
    owner, other = alone.memory_W[rank], alone.memory_W[1 - rank]
    # Only the owner has ids and bags of both ranks, and their gradients.
    assert other == 2 * bags
    assert owner == tables[0].size + 2 * bags + 2 * (tables[0].ids(BATCH) * 24 + 2 * bags)
    with pytest.raises(ValueError, match="does not fit"):
        decide(tables, BATCH, quick(2, memory=1.5 * size), search)
    # In pieces it would.
    assert decide(tables, BATCH, quick(2, memory=2.1 * size)).memory_W.max() <= 2.1e9 * size


def test_rarely_used_tables_go_to_host_memory() -> None:
    rare, often = table("rare", 10**8, pooling=0.1), table("often", 10**6, pooling=20.0)
    room = (often.size + 0.2 * rare.size) / 4 / 1e9
    cluster = quick(4, device="cuda", memory=room, host_memory=100.0, host_lookup=1.0)
    found = decide([rare, often], BATCH, cluster)
    assert found.on_host == (True, False)
    assert found.systems[0] in (FUSED, "row_wise", "column_wise")  # on all hosts together
    lookups = [p for s in found.steps for p in s.stages if p.name == "lookup_on_host"]
    assert lookups and lookups[0].seconds(cluster, cluster.fused) > 0
    assert found.memory_W.max() <= room * 1e9
    with pytest.raises(ValueError, match="does not fit"):
        decide([rare, often], BATCH, replace(cluster, host_memory=0.0))


# ---------------------------------------------------------------- what contradicts


def test_settings_that_cannot_be() -> None:
    tables = [table("a"), table("b", dim=62)]
    with pytest.raises(ValueError, match=r"search.tables names 'c', which is no table.* a, b"):
        decide(tables, BATCH, quick(2), SearchConfig(tables={"c": ["fused_row_wise"]}))
    with pytest.raises(ValueError, match="'b' may only be fused_row_wise, which it cannot"):
        decide(tables, BATCH, quick(2), SearchConfig(systems=["fused_row_wise"]), unfit=["b"])
    with pytest.raises(ValueError, match="'b' with 62 columns cannot be column_wise on 2 ranks"):
        decide(tables, BATCH, quick(2), SearchConfig(tables={"b": ["column_wise"]}))
    with pytest.raises(ValueError, match="has 3, must divide the cluster's 4 ranks"):
        decide(tables, BATCH, quick(4), SearchConfig(groups=GroupsConfig(sizes=[3])))
    with pytest.raises(ValueError, match="no tables"):
        decide([], BATCH, quick(2))


def test_constraints_are_kept() -> None:
    tables = [table(f"t{t}", 500) for t in range(4)]
    search = SearchConfig(tables={"t1": ["table_wise"], "t3": ["row_wise", "column_wise"]})
    systems = decide(tables, BATCH, quick(2), search).systems
    assert systems[1] == "table_wise" and systems[3] in ("row_wise", "column_wise")


@pytest.mark.slow
def test_a_thousand_tables_on_4096_ranks() -> None:
    """How long it takes is in benchmarks/plan_scale.py."""
    random = np.random.default_rng(0)
    tables = [
        table(
            f"t{t}",
            int(float(f"{10 ** random.uniform(2, 7):.1g}")),
            int(random.choice([16, 64, 128])),
            float(random.choice([1, 1, 1, 10, 50])),
            float(random.choice([0.0, 0.8, 1.1])),
        )
        for t in range(1000)
    ]
    cluster = quick(4096, ranks_per_node=8, memory=80.0)
    found = decide(tables, BATCH, cluster)
    assert len(found.systems) == 1000 and found.memory_W.shape == (4096,)
    even = decide(
        tables, BATCH, cluster, SearchConfig(systems=["fused_row_wise"], row_ranges="even")
    )
    assert found.seconds <= even.seconds
