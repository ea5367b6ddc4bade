"""Capacity and overflow of the single-shot input dist, on real ranks."""

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from fusedrec_torchrec.core.collective_counter import CollectiveCounter
from fusedrec_torchrec.exchange.buckets import BucketedTables, group_into_buckets
from fusedrec_torchrec.exchange.capacity import Capacity
from fusedrec_torchrec.exchange.input_dist import FusedInputDist
from fusedrec_torchrec.exchange.layout import ExchangeLayout
from fusedrec_torchrec.exchange.options import ExchangeOptions, InputDist
from tests.cluster import Cluster
from tests.exchange.tables import sharded_tables


def test_capacity_grows_at_once_and_shrinks_slowly() -> None:
    capacity = Capacity(ExchangeOptions(capacity_slack=0.125))
    assert capacity.current == 0
    wanted = capacity.wanted(1000)
    assert wanted == 1152  # 1125 rounded up to a multiple of 64
    for count in (0, 1, 56, 57, 1000, 2**31 - 1):
        assert capacity.wanted(count) >= 1.125 * count
        assert int(capacity.wanted(torch.tensor(count))) == capacity.wanted(count)
    capacity.update(wanted)
    assert capacity.current == 1152
    capacity.update(64)
    assert 1000 < capacity.current < 1152
    for _ in range(100):
        capacity.update(64)
    assert capacity.current == 64
    capacity.update(2048)
    assert capacity.current == 2048


def test_capacity_is_always_zero_with_exact_counts() -> None:
    capacity = Capacity(ExchangeOptions(input_dist="exact_counts"))
    capacity.update(capacity.wanted(1000))
    assert capacity.current == 0


def exchange(batches: list[list[list[list[int]]]], slack: float, mode: InputDist) -> list[int]:
    """Exchanges [step][rank][table] ids; checks what arrives; returns collectives per step."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    rows = 1000
    starts = [rows * r // world_size for r in range(world_size + 1)]
    specs: list[dict[str, object]] = [{"name": "a", "dim": 8}, {"name": "b", "dim": 4}]
    tables = BucketedTables(group_into_buckets(sharded_tables(specs, [starts, starts])))
    layout = ExchangeLayout(tables, torch.device("cpu"))
    group = dist.group.WORLD
    assert group is not None
    input_dist = FusedInputDist(
        group, layout, ExchangeOptions(capacity_slack=slack, input_dist=mode), None
    )
    counts, capacities = [], []
    for step in batches:
        mine = step[rank]
        features = KeyedJaggedTensor(
            keys=["f_a", "f_b"],
            values=torch.tensor(mine[0] + mine[1], dtype=torch.int64),
            lengths=torch.tensor([len(mine[0]), len(mine[1])]),
        )
        with CollectiveCounter() as counter:
            received = input_dist(features).wait().wait()
        counts.append(len(counter.collectives))
        capacities.append(input_dist.exchange.capacity.current)
        want = [
            [sorted({i - starts[rank] for i in ids if starts[rank] <= i < starts[rank + 1]})]
            for sender in step
            for ids in sender
        ]
        of_buckets = [
            bucket.rows_R.split([counts[k] for counts in received.context.counts_in])
            for k, bucket in enumerate(received.asked())
        ]
        parts = [part for sender in zip(*of_buckets, strict=True) for part in sender]
        # Every sender sends each row once; in which order is its own affair.
        assert [[sorted(part.tolist())] for part in parts] == want
        assert all(part.dtype == torch.int32 for part in parts)
    everywhere: list[object] = [None] * world_size
    dist.all_gather_object(everywhere, capacities)
    assert all(other == capacities for other in everywhere)
    return counts


def ids(first: int, count: int) -> list[int]:
    return [(first + 7 * i) % 1000 for i in range(count)]


def test_overflow_runs_a_second_round_and_loses_nothing(cluster_2: Cluster) -> None:
    small, large = [ids(0, 20), ids(3, 10)], [ids(0, 900), ids(5, 900)]
    steps = [[small, small], [small, small], [small, large], [large, small], [small, small]]
    # The first step knows no capacity, and the third does not fit on one rank.
    for counts in cluster_2.run(exchange, steps, 0.125, "single_shot"):
        assert counts == [2, 1, 2, 1, 1]


def test_exact_counts_take_two_rounds_unless_there_is_nothing(cluster_2: Cluster) -> None:
    nothing: list[list[int]] = [[], []]
    some = [ids(0, 20), nothing[0]]
    steps = [[some, nothing], [nothing, nothing], [nothing, some]]
    for counts in cluster_2.run(exchange, steps, 0.125, "exact_counts"):
        assert counts == [2, 1, 2]


@pytest.mark.parametrize("mode", ["single_shot", "exact_counts"])
@given(
    batches=st.lists(
        st.lists(
            st.lists(st.lists(st.integers(0, 999), max_size=300), min_size=2, max_size=2),
            min_size=2,
            max_size=2,
        ),
        min_size=1,
        max_size=4,
    ),
    slack=st.sampled_from([0.0, 0.125, 1.0]),
)
@settings(max_examples=25)
def test_everything_arrives_in_order(
    cluster_2: Cluster, mode: InputDist, batches: list[list[list[list[int]]]], slack: float
) -> None:
    cluster_2.run(exchange, batches, slack, mode)


def test_four_ranks(cluster_4: Cluster) -> None:
    steps = [
        [[ids(37 * r, 50 * (r + 1) * (s + 1)), ids(r, 20)] for r in range(4)] for s in range(3)
    ]
    cluster_4.run(exchange, steps, 0.0, "single_shot")
