"""A hot set that follows the data: the same on all ranks, and training does not notice."""

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

import fusedrec_torchrec as fr
from fusedrec_torchrec.hot.adapt import next_home_keys
from fusedrec_torchrec.hot.index import EMPTY
from tests.case import Case, Table, batch, sharded
from tests.cluster import Cluster
from tests.hot.replicas import (
    hot_rows,
    replica_bits,
    same,
    same_on_all_ranks,
    train_and_compare,
    without_hot_rows,
)
from tests.parity import train_step

ADAPT = fr.AdaptOptions(every=2, counters=64, sample=1, decay=0.5, margin=1.0)
TABLES = (
    Table("a", 50, dim=8, pooling="mean", hot=(40, 41, 42, 43, 44)),
    Table("b", 33, dim=16, hot=(30, 31, 32)),
    Table("c", 20, dim=8),
)


def case_of(ranks: int, **options: Any) -> Case:
    return Case(
        tables=TABLES,
        batch_sizes=(5, 6, 0, 4)[:ranks],
        optimizer="rowwise_adagrad",
        steps=9,
        hot_options=fr.HotOptions(adapt=ADAPT, **options),
    )


@pytest.mark.parametrize("hot_batches", [False, True])
@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_training_equals_training_without_hot_rows(
    clusters: Callable[[int], Cluster], world_size: int, hot_batches: bool
) -> None:
    clusters(world_size).run(train_and_compare, case_of(world_size, hot_batches=hot_batches))


def follow(case: Case) -> None:
    """The hot set moves to the rows that are used, by all ranks at once; eval does not count."""
    model = sharded(case)
    hot = hot_rows(model)
    versions = []
    for step in range(case.steps):
        if step == 4:
            model.eval()
            with torch.no_grad():
                for number in range(5):
                    model(batch(case, 100 + number, dist.get_rank()))
            model.train()
        train_step(case, model, step)
        versions.append(hot.index.version)
        homes = torch.cat(hot.index.home_keys)
        everywhere = [torch.empty_like(homes) for _ in range(dist.get_world_size())]
        dist.all_gather(everywhere, homes)
        assert all(torch.equal(homes, other) for other in everywhere)
    assert versions[0] == 0 and 1 <= versions[-1] <= 4
    # Low ids are the frequent ones, and the first hot set is of high ones.
    stays_case = dataclasses.replace(case, hot_options=None)
    stays = sharded(stays_case)
    hot.used.hot = 0
    for step in range(50, 60):
        train_step(case, model, step)
        train_step(stays_case, stays, step)
    assert hot.used.hot > 3 * hot_rows(stays).used.hot


def test_the_hot_set_follows_the_data(cluster_2: Cluster) -> None:
    cluster_2.run(follow, case_of(2))


def stay(case: Case) -> None:
    """The same batch again and again: the most used rows are hot, and stay so."""
    model = sharded(case)
    hot = hot_rows(model)
    for _ in range(2 * ADAPT.every):
        train_step(case, model, 0)
    settled = [keys.sort().values for keys in hot.index.home_keys]
    version = hot.index.version
    for _ in range(4 * ADAPT.every):
        train_step(case, model, 0)
    assert hot.index.version == version > 0
    for before, after in zip(settled, hot.index.home_keys, strict=True):
        assert torch.equal(before, after.sort().values)


def test_a_hot_set_that_is_right_stays(cluster_2: Cluster) -> None:
    """Rows that are hot are counted, too, as the rows they are."""
    sizes = dataclasses.replace(case_of(2), batch_sizes=(40, 40))
    cluster_2.run(stay, sizes)


def save_and_swap(case: Case) -> None:
    """Writes into the tables between swaps count, also for rows that come and go."""
    plain_case = without_hot_rows(case)
    model, plain = sharded(case), sharded(plain_case)
    for step in range(case.steps):
        for each in (model, plain):
            if step in (2, 5):
                for value in each.state_dict().values():
                    value.local_shards()[0].tensor[:4] += 1
        train_step(case, model, step)
        train_step(plain_case, plain, step)
        same_on_all_ranks(replica_bits(model))
    same(model.state_dict(), plain.state_dict())
    same(model.fused_optimizer.state_dict()["state"], plain.fused_optimizer.state_dict()["state"])


def test_writing_into_a_state_dict_counts(cluster_2: Cluster) -> None:
    cluster_2.run(save_and_swap, case_of(2))


def test_with_a_sync_every_two_steps(cluster_2: Cluster) -> None:
    """Swaps reconcile first.  SGD and a linear loss: the end is that of exact training."""
    case = dataclasses.replace(case_of(2, sync_every=3), optimizer="sgd", steps=9)
    cluster_2.run(swap_and_compare_ends, case)


def swap_and_compare_ends(case: Case) -> None:
    plain_case = without_hot_rows(case)
    model, plain = sharded(case), sharded(plain_case)
    for step in range(case.steps):
        train_step(case, model, step)
        train_step(plain_case, plain, step)
    assert hot_rows(model).index.version > 0
    fr.reconcile(model)
    same(model.state_dict(), plain.state_dict())


def backward_too_late(case: Case) -> None:
    model = sharded(case)
    waiting = [model(batch(case, step, dist.get_rank())) for step in range(2)]
    model(batch(case, 2, dist.get_rank()))  # the first one with the new hot set
    with pytest.raises(RuntimeError, match="backward must come before the next batch's forward"):
        sum(output.sum() for output in waiting[0].values()).backward()


def test_a_backward_after_the_swap_is_refused(cluster_2: Cluster) -> None:
    cluster_2.run(backward_too_late, case_of(2))


def test_rooms_without_a_profile_fill_up(cluster_2: Cluster) -> None:
    tables = tuple(dataclasses.replace(t, hot=None) for t in TABLES)
    options = fr.HotOptions(rule=fr.HotRule(top_k=6), adapt=ADAPT)
    case = dataclasses.replace(case_of(2), tables=tables, hot_options=options)
    cluster_2.run(train_and_compare, case)
    cluster_2.run(fill_up, case)


def fill_up(case: Case) -> None:
    model = sharded(case)
    hot = hot_rows(model)
    assert [len(keys) for keys in hot.index.home_keys] == [4, 2]
    assert all(bool((keys == EMPTY).all()) for keys in hot.index.home_keys)
    for step in range(4):
        train_step(case, model, step)
    assert all(bool((keys != EMPTY).all()) for keys in hot.index.home_keys)


@settings(deadline=None)
@given(
    st.sets(st.integers(0, 30), max_size=6),
    st.integers(0, 3),
    st.dictionaries(st.integers(0, 30), st.integers(1, 9)),
    st.sampled_from([1.0, 1.5, 3.0]),
)
def test_the_next_hot_set_is_the_most_used(
    lived: set[int], free: int, counts: dict[int, int], margin: float
) -> None:
    before = torch.tensor([*lived, *[EMPTY] * free], dtype=torch.int64)
    keys = sorted(counts)
    after = next_home_keys(
        before, torch.tensor(keys, dtype=torch.int64), torch.tensor([counts[k] for k in keys]),
        margin,
    )  # fmt: skip
    assert after.shape == before.shape
    inside = [k for k in after.tolist() if k != EMPTY]
    assert len(set(inside)) == len(inside)
    assert set(inside) <= lived | set(counts)
    for place, (old, new) in enumerate(zip(before.tolist(), after.tolist(), strict=True)):
        if old != new:
            assert old == EMPTY or old not in inside, place  # who stays keeps its place
    left, came = lived - set(inside), set(inside) - lived
    for new in came:
        for old in left:
            assert counts[new] >= margin * counts.get(old, 0)
    # Nobody outside is used so much more than somebody inside.
    for out in set(counts) - set(inside):
        assert len(inside) == len(before)
        for old in inside:
            factor = margin if old in lived else 1.0
            assert counts[out] <= factor * counts.get(old, 0) + 1e-6
