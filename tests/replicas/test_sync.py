"""Gradients of all ranks become the same update of every replica, whichever way they travel."""

from typing import Any

import pytest
import torch
import torch.distributed as dist

from fusedrec_torchrec.core.collective_counter import CollectiveCounter
from fusedrec_torchrec.replicas.replica import Replica
from fusedrec_torchrec.replicas.sync import GradientSync
from tests.cluster import Cluster
from tests.replicas.kernels import places_of, replica_of

# Places that each rank's batch uses, of each bucket.  Rank 2 uses none at all.
PLACES: list[list[list[int]]] = [[[0, 3], [1]], [[3], [0, 1, 2, 4, 5]], [[], []], [[5, 3, 1], []]]
DIMS = (4, 8)


def gradient(rank: int, bucket: int, place: int) -> float:
    """A whole number, so that sums are the same in any order."""
    return float(100 * bucket + 10 * rank + place + 1)


def group() -> dist.ProcessGroup:
    assert dist.group.WORLD is not None
    return dist.group.WORLD


def batch_of(rank: int) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Places and gradients of a rank's batch."""
    places = [places_of(*of_bucket) for of_bucket in PLACES[rank]]
    gradients = [
        torch.tensor([gradient(rank, k, place) for place in of_bucket])[:, None].repeat(1, dim)
        for k, (of_bucket, dim) in enumerate(zip(PLACES[rank], DIMS, strict=True))
    ]
    return places, [g.view(-1, dim) for g, dim in zip(gradients, DIMS, strict=True)]


def counts() -> list[list[int]]:
    return [[len(of_bucket) for of_bucket in PLACES[r]] for r in range(dist.get_world_size())]


def summed(capacity: int) -> list[list[float]]:
    """The sums over all ranks, [bucket][place]."""
    sums = [[0.0] * capacity for _ in DIMS]
    for rank in range(dist.get_world_size()):
        for k, of_bucket in enumerate(PLACES[rank]):
            for place in of_bucket:
                sums[k][place] += gradient(rank, k, place)
    return sums


def start(sync: GradientSync, all_to_all: bool = True) -> None:
    sync.start(*batch_of(dist.get_rank()), counts(), all_to_all)


def replicas_of(capacity: int, **settings: Any) -> list[Replica]:
    return [replica_of(capacity, dim, **settings) for dim in DIMS]


def weights(replicas: list[Replica]) -> list[list[float]]:
    """The first column of each bucket; all columns are alike."""
    for replica in replicas:
        rows = replica.tensors[0]
        assert torch.equal(rows, rows[:, :1].expand_as(rows))
    return [replica.tensors[0][:, 0].tolist() for replica in replicas]


def sync_once(capacity: int, all_to_all: bool) -> list[str]:
    """One batch; returns the collectives that it took."""
    replicas = replicas_of(capacity)
    sync = GradientSync(group(), replicas)
    with CollectiveCounter() as counter:
        start(sync, all_to_all)
        assert weights(replicas) == [[0.0] * capacity] * 2  # not before it has finished
        sync.finish()
    want = [[-0.5 * value for value in of_bucket] for of_bucket in summed(capacity)]
    assert weights(replicas) == want
    sync.finish()  # nothing is left to do
    assert weights(replicas) == want
    return sorted({collective.name for collective in counter.collectives})


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("all_to_all", [True, False])
def test_touched_rows_go_to_everybody(clusters: Any, ranks: int, all_to_all: bool) -> None:
    """The messages of two ranks lie side by side; of four, a rank's own one comes first."""
    names = clusters(ranks).run(sync_once, 1000, all_to_all)
    assert not any("all_reduce" in of_rank for of_rank in names)
    assert all(
        ("all_to_all" in "".join(of_rank)) == (all_to_all and ranks > 1) for of_rank in names
    )


def test_many_touched_rows_are_summed(cluster_4: Cluster) -> None:
    """A sum over all places is fewer bytes than rows one by one if there are few places."""
    assert cluster_4.run(sync_once, 6, True) == [["all_reduce"]] * 4


def sync_one_bucket(all_to_all: bool) -> list[float]:
    """Gradients of two ranks and one bucket lie side by side, and are not copied."""
    replica = replica_of(1000, DIMS[0])
    sync = GradientSync(group(), [replica])
    (places, _), (gradients, _) = batch_of(dist.get_rank())
    sync.start([places], [gradients], [row[:1] for row in counts()], all_to_all)
    sync.finish()
    assert weights([replica]) == [[-0.5 * value for value in summed(1000)[0]]]
    return weights([replica])[0][:6]


@pytest.mark.parametrize("all_to_all", [True, False])
def test_one_bucket_of_two_ranks(cluster_2: Cluster, all_to_all: bool) -> None:
    want = [-0.5 * 1, 0.0, 0.0, -0.5 * (4 + 14), 0.0, 0.0]
    assert cluster_2.run(sync_one_bucket, all_to_all) == [want] * 2


def clip() -> list[list[float]]:
    """Every gradient is clipped by itself, before they are summed."""
    replicas = replicas_of(6, gradient_clipping=True, max_gradient=1.0)
    sync = GradientSync(group(), replicas)
    start(sync)
    sync.finish()
    return weights(replicas)


def test_clipped_gradients_are_not_summed_on_the_way(cluster_4: Cluster) -> None:
    """Place 3 is touched by three ranks with gradients far above 1."""
    found = cluster_4.run(clip)
    assert found == [found[0]] * 4
    assert found[0][0] == [-0.5, -0.5, 0.0, -1.5, 0.0, -0.5]


def learn_later() -> list[list[float]]:
    """The learning rate changes while gradients are on their way."""
    replicas = replicas_of(1000)
    sync = GradientSync(group(), replicas)
    start(sync)
    for replica in replicas:
        replica.kernel.table.set_learning_rate(4.0)
    sync.finish()
    first = weights(replicas)
    assert first == [[-0.5 * value for value in of_bucket] for of_bucket in summed(1000)]
    start(sync)
    sync.finish()
    return [
        [(late - early) for late, early in zip(*both, strict=True)][:6]
        for both in zip(weights(replicas), first, strict=True)
    ]


def test_gradients_keep_the_settings_of_their_step(cluster_2: Cluster) -> None:
    for found in cluster_2.run(learn_later):
        # By 4: places 0 and 3 of the first bucket, all but 3 of the second.
        assert found == [
            [-4.0, 0.0, 0.0, -4.0 * (4 + 14), 0.0, 0.0],
            [-4.0 * 111, -4.0 * (102 + 112), -4.0 * 113, 0.0, -4.0 * 115, -4.0 * 116],
        ]


def nothing_touched() -> list[str]:
    replicas = replicas_of(6)
    sync = GradientSync(group(), replicas)
    empty = [places_of(), places_of()], [torch.empty(0, dim) for dim in DIMS]
    with CollectiveCounter() as counter:
        sync.start(*empty, [[0, 0]] * dist.get_world_size(), True)
        sync.finish()
    assert weights(replicas) == [[0.0] * 6] * 2
    return [collective.name for collective in counter.collectives]


def test_no_collective_if_nobody_touched_a_row(cluster_2: Cluster) -> None:
    assert cluster_2.run(nothing_touched) == [[], []]


def alone_in_between(capacity: int) -> None:
    """A rank takes a step by itself, which the sync of the second step undoes and sums up."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    replicas = replicas_of(capacity)
    sync = GradientSync(group(), replicas, every=2)
    start(sync)
    own = [[0.0] * capacity for _ in DIMS]
    for k, of_bucket in enumerate(PLACES[rank]):
        for place in of_bucket:
            own[k][place] = -0.5 * ranks * gradient(rank, k, place)
    assert weights(replicas) == own  # as if all ranks had had this batch
    for k in range(2):
        assert not sync.reconciled(k)[0].any()
    start(sync)
    sync.finish()
    want = [[-0.5 * 2 * value for value in of_bucket] for of_bucket in summed(capacity)]
    assert weights(replicas) == want
    for k in range(2):
        assert sync.reconciled(k)[0][:, 0].tolist() == want[k]
    # Half of the next two steps, and then a sync out of turn.
    start(sync)
    sync.reconcile()
    sync.finish()
    assert weights(replicas) == [
        [-0.5 * 3 * value for value in of_bucket] for of_bucket in summed(capacity)
    ]
    sync.reconcile()  # nothing is left to do
    sync.finish()


@pytest.mark.parametrize("capacity", [6, 1000], ids=["few places", "many places"])
@pytest.mark.parametrize("ranks", [2, 4])
def test_steps_alone_are_undone_and_summed(clusters: Any, ranks: int, capacity: int) -> None:
    clusters(ranks).run(alone_in_between, capacity)


def begin_anew() -> None:
    """What was put off belongs to the values before, and goes with them."""
    replicas = replicas_of(6)
    sync = GradientSync(group(), replicas, every=2)
    start(sync)
    for replica in replicas:
        replica.tensors[0].fill_(7.0)
    sync.reset()
    sync.reconcile()
    sync.finish()
    assert weights(replicas) == [[7.0] * 6] * 2
    start(sync)
    start(sync)
    sync.finish()
    assert weights(replicas) == [[7.0 - value for value in of_bucket] for of_bucket in summed(6)]


def test_a_reset_forgets_what_was_put_off(cluster_2: Cluster) -> None:
    cluster_2.run(begin_anew)


def put_off(optimizer: str) -> list[list[float]]:
    """The optimizer's state is undone, too: after a sync it has seen one gradient, the sum."""
    replicas = replicas_of(6, optimizer=optimizer, eps=0.0)
    sync = GradientSync(group(), replicas, every=2)
    start(sync)
    start(sync)
    sync.finish()
    return [replica.tensors[1][:, 0].tolist() for replica in replicas]


@pytest.mark.parametrize("optimizer", ["adagrad", "rowwise_adagrad"])
def test_states_of_steps_alone_are_undone(cluster_2: Cluster, optimizer: str) -> None:
    first, second = cluster_2.run(put_off, optimizer)
    assert first == second
    assert first[0] == [(2.0 * value) ** 2 for value in (1.0, 0.0, 0.0, 4.0 + 14.0, 0.0, 0.0)]
