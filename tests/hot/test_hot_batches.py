"""FAE's hot batches: where no rank needs an owner, nothing is exchanged."""

import dataclasses
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

import fusedrec_torchrec as fr
from fusedrec_torchrec.core.collective_counter import CollectiveCounter
from tests.case import Case, Table, batch, coefficients, sharded
from tests.cluster import Cluster
from tests.hot.replicas import (
    replica_bits,
    same,
    same_on_all_ranks,
    train_and_compare,
    without_hot_rows,
)
from tests.hot.test_parity import MIXED_DIMS

HOT_BATCHES = fr.HotOptions(hot_batches=True)
TABLES = (
    Table("a", 50, dim=8, pooling="mean", hot=(0, 1, 2, 3, 25, 49)),
    Table("b", 33, dim=16, hot=(0, 1, 2, 17)),
)


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_training_equals_training_without_hot_rows(
    clusters: Callable[[int], Cluster], world_size: int
) -> None:
    case = Case(
        tables=MIXED_DIMS,
        batch_sizes=(3, 6, 0, 5)[:world_size],
        optimizer="rowwise_adagrad",
        hot_options=HOT_BATCHES,
    )
    clusters(world_size).run(train_and_compare, case)


def only_hot(case: Case, features: KeyedJaggedTensor) -> KeyedJaggedTensor:
    """The batch with other ids, all of them hot."""
    ids = []
    for table in case.tables:
        hot = torch.tensor(table.hot)
        ids.append(hot[features[table.feature_names[0]].values() % len(hot)])
    return KeyedJaggedTensor(
        keys=features.keys(), values=torch.cat(ids), lengths=features.lengths()
    )


def train(case: Case, model: torch.nn.Module, step: int, hot_ranks: list[int]) -> CollectiveCounter:
    rank = dist.get_rank()
    features = batch(case, step, rank)
    if rank in hot_ranks:
        features = only_hot(case, features)
    with CollectiveCounter() as counter:
        outputs = model(features)
        sum(
            (output * coefficients(case, step, rank, name, output)).sum()
            for name, output in outputs.items()
        ).backward()
    return counter


def hot_and_cold(case: Case) -> None:
    """All-hot steps have no all-to-all; steps with one cold batch have all three."""
    plain_case = without_hot_rows(case)
    model, plain = sharded(case), sharded(plain_case)
    kinds = [[0, 1], [0], [], [0, 1], [0, 1], [1], []]
    table = tuple(dataclasses.replace(t) for t in case.tables)
    assert all(t.hot is not None for t in table)
    for step, hot_ranks in enumerate(kinds):
        counter = train(case, model, step, hot_ranks)
        exchanges = [c for c in counter.collectives if c.name == "all_to_all"]
        all_hot = len(hot_ranks) == 2
        assert all_hot == (not exchanges), (step, counter.collectives)
        assert sum(c.bytes_sent for c in exchanges) == 0 or not all_hot
        train(dataclasses.replace(plain_case, tables=case.tables), plain, step, hot_ranks)
    same(model.state_dict(), plain.state_dict())
    same(model.fused_optimizer.state_dict()["state"], plain.fused_optimizer.state_dict()["state"])


@pytest.mark.parametrize("optimizer", ["sgd", "rowwise_adagrad"])
def test_hot_batches_need_no_all_to_all(cluster_2: Cluster, optimizer: str) -> None:
    case = Case(tables=TABLES, batch_sizes=(6, 4), optimizer=optimizer, hot_options=HOT_BATCHES)
    cluster_2.run(hot_and_cold, case)


def write_on_one_rank(case: Case) -> None:
    """One rank's tables are written into between hot batches: all ranks load them."""
    plain_case = without_hot_rows(case)
    model, plain = sharded(case), sharded(plain_case)
    plain_hot = dataclasses.replace(plain_case, tables=case.tables)
    for step in range(4):
        if step == 2:
            states = [each.state_dict() for each in (model, plain)]
            if dist.get_rank() == 1:
                for state in states:
                    for value in state.values():
                        value.local_shards()[0].tensor += 1
        train(case, model, step, [0, 1])
        train(plain_hot, plain, step, [0, 1])
    same_on_all_ranks(replica_bits(model))
    same(model.state_dict(), plain.state_dict())


def test_a_write_on_one_rank_is_heard_in_a_hot_batch(cluster_2: Cluster) -> None:
    case = Case(
        tables=TABLES, batch_sizes=(6, 4), optimizer="rowwise_adagrad", hot_options=HOT_BATCHES
    )
    cluster_2.run(write_on_one_rank, case)


def bad_id_in_a_hot_batch(case: Case) -> str:
    model = sharded(case)
    features = only_hot(case, batch(case, 0, dist.get_rank()))
    if dist.get_rank() == 1:
        features.values()[0] = 1000
    with pytest.raises(ValueError, match="bad input on rank 1") as error:
        model(features)
    train(case, model, 1, [0, 1])  # and the next batch is fine
    return str(error.value)


def test_a_bad_id_in_a_hot_batch_is_an_error_on_all_ranks(cluster_2: Cluster) -> None:
    case = Case(tables=TABLES, batch_sizes=(6, 4), lengths=(1,), hot_options=HOT_BATCHES)
    messages = cluster_2.run(bad_id_in_a_hot_batch, case)
    assert len(set(messages)) == 1
    assert "bad input on rank 1: feature 'f_a' of table 'a': id 1000" in messages[0]
