"""Replicas that are reconciled every k steps: what ``replicas.sync`` promises."""

import dataclasses
from typing import Any

import pytest
import torch
import torch.distributed as dist

import fusedrec_torchrec as fr
from fusedrec_torchrec.core.collective_counter import CollectiveCounter
from tests.case import Case, Table, batch, coefficients, initial_weight, sharded
from tests.cluster import Cluster
from tests.hot.replicas import replica_bits, same, same_on_all_ranks, without_hot_rows
from tests.parity import train_step, whole

HOT = (0, 1, 2, 25, 49)
TABLES = (Table("a", 50, hot=HOT), Table("b", 33, dim=16, hot=(0, 1, 20)), Table("c", 20))


def case_of(every: int, **kwargs: Any) -> Case:
    return Case(
        tables=TABLES, batch_sizes=(6, 6), hot_options=fr.HotOptions(sync_every=every), **kwargs
    )


@pytest.mark.parametrize("every", [2, 3])
def test_sgd_ends_where_exact_training_ends(cluster_2: Cluster, every: int) -> None:
    """The loss is linear in the rows, so gradients do not depend on how old the rows are.

    Outputs do, so only the end of the run can be compared.
    """
    cluster_2.run(compare_ends, case_of(every, steps=6))


def compare_ends(case: Case) -> None:
    plain_case = without_hot_rows(case)
    got, want = sharded(case), sharded(plain_case)
    for step in range(case.steps):
        train_step(case, got, step)
        train_step(plain_case, want, step)
    same_on_all_ranks(replica_bits(got))
    same(got.state_dict(), want.state_dict())


def same_batches(case: Case) -> None:
    """With equal batches, what a rank does alone in between is what all do together."""
    models = sharded(case), sharded(without_hot_rows(case))
    for step in range(case.steps):
        outputs = []
        for model in models:
            found = model(batch(case, step, 0))
            sum(
                (out * coefficients(case, step, 0, n, out)).sum() for n, out in found.items()
            ).backward()
            outputs.append(found)
        for name in outputs[0]:
            assert torch.equal(outputs[0][name], outputs[1][name]), (step, name)


def test_in_between_a_rank_takes_its_batch_for_all(cluster_2: Cluster) -> None:
    cluster_2.run(same_batches, case_of(4, steps=4))


def gradient_sums(case: Case, steps: range) -> torch.Tensor:
    """Of table a, over all ranks and the given steps; divided by the number of ranks."""
    weight = torch.zeros(50, 8)
    for step in steps:
        for rank in range(dist.get_world_size()):
            features = batch(case, step, rank)["f_a"]
            like = torch.empty(features.lengths().numel(), 8)
            upstream = coefficients(case, step, rank, "f_a", like)
            bag = torch.repeat_interleave(features.lengths())
            weight.index_add_(0, features.values(), upstream[bag])
    return weight / dist.get_world_size()


def adagrad_with_large_batches(case: Case, every: int) -> None:
    """Between two syncs: one AdaGrad step with the sum of all gradients."""
    model = sharded(case)
    weight, state = initial_weight(case, 0), torch.zeros(50, 8)
    for first in range(0, case.steps, every):
        for step in range(first, first + every):
            train_step(case, model, step)
        gradient = gradient_sums(case, range(first, first + every))
        state += gradient**2
        weight -= case.learning_rate * gradient / (state.sqrt() + case.eps)
    got = whole(model.state_dict()["sparse.embedding_bags.a.weight"], torch.zeros(50, 8))
    torch.testing.assert_close(got[list(HOT)], weight[list(HOT)], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("every", [1, 2, 4])
def test_adagrad_takes_the_steps_between_two_syncs_for_one_batch(
    cluster_2: Cluster, every: int
) -> None:
    case = case_of(every, optimizer="adagrad", steps=4)
    cluster_2.run(adagrad_with_large_batches, case, every)


def go_on_alone(case: Case, every: int) -> None:
    model = sharded(case)
    for step in range(2 * every):
        with CollectiveCounter() as counter:
            train_step(case, model, step)
        syncs = [c.name for c in counter.collectives if c.name in ("send", "all_reduce")]
        loads = 1 if step == 0 else 0  # replicas get their first values
        syncs_now = (step + 1) % every == 0
        assert (len(syncs) > loads) == syncs_now, (step, syncs)
        bits = replica_bits(model)[0]
        everywhere = [torch.empty_like(bits) for _ in range(2)]
        dist.all_gather(everywhere, bits)
        assert torch.equal(*everywhere) == ((step + 1) % every == 0)


def test_ranks_go_on_alone_between_two_syncs(cluster_2: Cluster) -> None:
    cluster_2.run(go_on_alone, case_of(3), 3)


def save_between_syncs(case: Case) -> None:
    """A state dict shows the last sync; after ``reconcile`` it shows everything."""
    model, exact_case = sharded(case), without_hot_rows(case)
    exact = sharded(exact_case)
    for step in range(3):
        train_step(case, model, step)
        train_step(exact_case, exact, step)
    at_sync = whole(model.state_dict()["sparse.embedding_bags.a.weight"], torch.zeros(50, 8))
    for step in range(3, 5):
        train_step(case, model, step)
        train_step(exact_case, exact, step)
    between = whole(model.state_dict()["sparse.embedding_bags.a.weight"], torch.zeros(50, 8))
    assert torch.equal(between[list(HOT)], at_sync[list(HOT)])
    assert not torch.equal(between, at_sync)
    fr.reconcile(model)
    same_on_all_ranks(replica_bits(model))
    same(model.state_dict(), exact.state_dict())
    # The next sync comes three steps later.
    for step in range(5, 8):
        train_step(case, model, step)
        train_step(exact_case, exact, step)
    same(model.state_dict(), exact.state_dict())


def test_a_state_dict_between_two_syncs(cluster_2: Cluster) -> None:
    cluster_2.run(save_between_syncs, case_of(3))


def load_between_syncs(case: Case) -> None:
    """What was put off belongs to the weights before the load, and goes with them."""
    model, other = sharded(case), sharded(case)
    train_step(case, model, 0)
    for each in (model, other):
        source = sharded(dataclasses.replace(case, seed=5))
        each.load_state_dict(source.state_dict())
    for step in range(1, 4):
        for each in (model, other):
            train_step(case, each, step)
    same_on_all_ranks(replica_bits(model))
    same(model.state_dict(), other.state_dict())


def write_between_syncs(case: Case) -> None:
    """A write into one row takes nothing from the others."""
    plain_case = without_hot_rows(case)
    model, plain = sharded(case), sharded(plain_case)
    key = "sparse.embedding_bags.a.weight"
    for step in range(6):
        if step == 2:
            for each in (model, plain):
                each.state_dict()[key].local_shards()[0].tensor[4] = 7.0  # a cold row
        if step == 4 and dist.get_rank() == 0:
            for each in (model, plain):
                each.state_dict()[key].local_shards()[0].tensor[30 - 25] = 7.0
        train_step(case, model, step)
        train_step(plain_case, plain, step)
    fr.reconcile(model)
    same(model.state_dict(), plain.state_dict())


def test_writing_between_two_syncs(cluster_2: Cluster) -> None:
    cluster_2.run(write_between_syncs, case_of(3))


def test_loading_between_two_syncs(cluster_2: Cluster) -> None:
    cluster_2.run(load_between_syncs, case_of(3))


def test_one_rank_alone(cluster_1: Cluster) -> None:
    case = dataclasses.replace(case_of(3), batch_sizes=(6,))
    cluster_1.run(compare_ends, dataclasses.replace(case, steps=6))
