"""Training with hot rows equals training without: outputs, weights, optimizer state."""

import dataclasses
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torchrec.distributed.types import ShardedTensor

from fusedrec_torchrec.hot.rows import HotRows
from tests.case import Case, Table, sharded
from tests.cluster import Cluster
from tests.parity import check, run_and_check, train_step
from tests.reference import unsharded_run

OPTIMIZERS = ["sgd", "adagrad", "rowwise_adagrad"]
# Low ids are the frequent ones.
MIXED_DIMS = (
    Table("a", 50, dim=8, pooling="mean", hot=(0, 1, 2, 25, 49)),
    Table("b", 33, dim=16, hot=(0, 17)),
    Table("c", 7, dim=8, hot=(0, 1, 2, 3, 4, 5, 6)),
    Table("d", 130, dim=4, pooling="mean"),
    Table("e", 40, dim=8),
)


def hot_rows(model: torch.nn.Module) -> HotRows:
    hot = model.module.sparse.fused.hot
    assert hot is not None
    return hot


def replica_bits(model: torch.nn.Module) -> list[torch.Tensor]:
    hot = hot_rows(model)
    hot._sync.finish()
    return [
        tensor[: replica.capacity].clone().view(torch.uint8)
        for replica in hot._replicas
        for tensor in replica.tensors
    ]


def same_on_all_ranks(bits: list[torch.Tensor]) -> None:
    for mine in bits:
        everywhere = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
        dist.all_gather(everywhere, mine.contiguous())
        for other in everywhere:
            assert torch.equal(mine, other)


def train_and_compare(case: Case) -> None:
    """Against the unsharded run, and against fused training without hot rows.

    Bit for bit but where an all-reduce sums more than two numbers in an order of its own.
    """
    bit_for_bit = case.integers or dist.get_world_size() <= 2
    run = unsharded_run(case, dist.get_world_size())
    model = sharded(case)
    plain_case = dataclasses.replace(
        case, tables=tuple(dataclasses.replace(t, hot=None) for t in case.tables), hot_options=None
    )
    plain = sharded(plain_case)
    outputs = []
    for step in range(case.steps):
        outputs.append(train_step(case, model, step))
        same_on_all_ranks(replica_bits(model))
        want = train_step(plain_case, plain, step)
        for name, output in outputs[-1].items():
            assert not bit_for_bit or torch.equal(output, want[name]), (step, name)
    # The optimizer first: it must not need the model's state dict to be right.
    states = [each.fused_optimizer.state_dict()["state"] for each in (model, plain)]
    if bit_for_bit:
        same(*states)
        same(model.state_dict(), plain.state_dict())
    check(case, run, outputs, model)


def same(got: object, want: object) -> None:
    if isinstance(want, dict):
        assert isinstance(got, dict) and got.keys() == want.keys()
        for key in want:
            same(got[key], want[key])
    elif isinstance(want, ShardedTensor):
        assert isinstance(got, ShardedTensor)
        for one, other in zip(got.local_shards(), want.local_shards(), strict=True):
            assert torch.equal(one.tensor, other.tensor)
    elif isinstance(want, torch.Tensor):
        assert isinstance(got, torch.Tensor) and torch.equal(got, want)


@pytest.mark.parametrize("world_size", [1, 2, 4])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("integers", [True, False], ids=["exact", "random"])
def test_training_equals_training_without_hot_rows(
    clusters: Callable[[int], Cluster], world_size: int, optimizer: str, integers: bool
) -> None:
    case = Case(
        tables=MIXED_DIMS, batch_sizes=(6,) * world_size, optimizer=optimizer, integers=integers
    )
    clusters(world_size).run(train_and_compare, case)


@pytest.mark.parametrize("input_dist", ["single_shot", "exact_counts"])
def test_uneven_batches(cluster_4: Cluster, input_dist: str) -> None:
    case = Case(
        tables=MIXED_DIMS,
        batch_sizes=(3, 9, 0, 5),
        optimizer="rowwise_adagrad",
        input_dist=input_dist,
    )
    cluster_4.run(train_and_compare, case)


def test_one_id_per_bag(cluster_2: Cluster) -> None:
    case = Case(tables=MIXED_DIMS, batch_sizes=(5, 4), lengths=(1,), optimizer="adagrad")
    cluster_2.run(train_and_compare, case)


def test_weighted(cluster_2: Cluster) -> None:
    tables = tuple(dataclasses.replace(t, pooling="sum") for t in MIXED_DIMS)
    case = Case(tables=tables, batch_sizes=(5, 4), weighted=True, optimizer="rowwise_adagrad")
    cluster_2.run(train_and_compare, case)


def test_variable_batch_per_feature(cluster_2: Cluster) -> None:
    case = Case(tables=MIXED_DIMS, batch_sizes=(5, 4), vbe=True, optimizer="rowwise_adagrad")
    cluster_2.run(train_and_compare, case)


@pytest.mark.parametrize("vbe", [False, True])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_sequences(cluster_2: Cluster, optimizer: str, vbe: bool) -> None:
    tables = (Table("a", 50, hot=(0, 1, 2, 30)), Table("b", 33), Table("c", 7, hot=(0, 6)))
    case = Case(tables=tables, batch_sizes=(5, 4), kind="ec", optimizer=optimizer, vbe=vbe)
    cluster_2.run(train_and_compare, case)


def test_feature_processors(cluster_2: Cluster) -> None:
    tables = (Table("a", 50, hot=(0, 1, 2, 30)), Table("b", 33, hot=(5,)))
    cluster_2.run(run_and_check, Case(tables=tables, batch_sizes=(5, 4), kind="fp_ebc"))


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_fp16_weights(cluster_2: Cluster, optimizer: str) -> None:
    tables = (
        Table("a", 50, dtype="fp16", hot=(0, 1, 2, 30)),
        Table("b", 20, hot=(0,)),
        Table("c", 9, dtype="fp16"),
    )
    cluster_2.run(train_and_compare, Case(tables=tables, batch_sizes=(5, 4), optimizer=optimizer))


def test_fp16_outputs(cluster_2: Cluster) -> None:
    case = Case(tables=MIXED_DIMS, batch_sizes=(5, 4), output_dtype="fp16")
    cluster_2.run(train_and_compare, case)


def test_beside_stock_tables(cluster_2: Cluster) -> None:
    tables = (
        Table("a", 50, hot=(0, 1, 2, 30)),
        Table("b", 33, sharding="table_wise"),
        Table("c", 20, sharding="row_wise"),
    )
    cluster_2.run(run_and_check, Case(tables=tables, batch_sizes=(5, 5), optimizer="adagrad"))


def test_all_rows_hot(cluster_2: Cluster) -> None:
    tables = tuple(Table(n, 7, dim=d, hot=tuple(range(7))) for n, d in (("a", 8), ("b", 16)))
    cluster_2.run(train_and_compare, Case(tables=tables, batch_sizes=(6, 6)))
