"""EmbeddingBagCollection: outputs, weights and optimizer state equal the unsharded module's."""

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torchrec.distributed.comm_ops import set_gradient_division

from fusedrec_torchrec.exchange import layout
from fusedrec_torchrec.exchange.options import InputDist
from tests.case import Case, Table, batch, coefficients, initial_weight, sharded
from tests.cluster import Cluster
from tests.parity import check, local_parts, run_and_check, train_step
from tests.reference import unsharded_run

OPTIMIZERS = ["sgd", "adagrad", "rowwise_adagrad"]
MIXED_DIMS = (
    Table("a", 50, dim=8, pooling="mean"),
    Table("b", 33, dim=16),
    Table("c", 7, dim=8),
    Table("d", 130, dim=4, pooling="mean"),
)


@pytest.mark.parametrize("world_size", [1, 2, 4])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("integers", [True, False], ids=["exact", "random"])
def test_training_equals_unsharded_and_stock(
    clusters: Callable[[int], Cluster], world_size: int, optimizer: str, integers: bool
) -> None:
    case = Case(
        tables=MIXED_DIMS,
        batch_sizes=(6,) * world_size,
        optimizer=optimizer,
        integers=integers,
    )
    clusters(world_size).run(run_and_check, case, also_stock=True)


@pytest.mark.parametrize("input_dist", ["single_shot", "exact_counts"])
@pytest.mark.parametrize("world_size", [2, 4])
def test_uneven_batches(
    clusters: Callable[[int], Cluster], world_size: int, input_dist: InputDist
) -> None:
    case = Case(
        tables=MIXED_DIMS,
        batch_sizes=(3, 9, 1, 5)[:world_size],
        optimizer="rowwise_adagrad",
        input_dist=input_dist,
    )
    clusters(world_size).run(run_and_check, case)


@pytest.mark.parametrize("batch_sizes", [(0, 4), (4, 0), (0, 0)])
def test_empty_batches(cluster_2: Cluster, batch_sizes: tuple[int, ...]) -> None:
    cluster_2.run(run_and_check, Case(tables=MIXED_DIMS, batch_sizes=batch_sizes))


def test_no_ids_at_all(cluster_2: Cluster) -> None:
    cluster_2.run(run_and_check, Case(tables=MIXED_DIMS, batch_sizes=(3, 3), lengths=(0,)))


def test_one_id_per_bag(cluster_2: Cluster) -> None:
    case = Case(tables=MIXED_DIMS, batch_sizes=(5, 4), lengths=(1,), optimizer="adagrad")
    cluster_2.run(run_and_check, case)


@pytest.mark.parametrize("lengths", [(1,), (0, 1, 2, 4)])
def test_weighted(cluster_2: Cluster, lengths: tuple[int, ...]) -> None:
    case = Case(
        tables=tuple(Table(t.name, t.rows, t.dim) for t in MIXED_DIMS),
        batch_sizes=(5, 4),
        weighted=True,
        lengths=lengths,
        optimizer="rowwise_adagrad",
    )
    cluster_2.run(run_and_check, case, also_stock=True)


def train_weighted_means(case: Case) -> None:
    """Against sum(weight * row) / length, written out, and its gradient.

    TorchRec's unsharded module cannot do weighted means.  Its table-wise sharding gives these
    outputs, but FBGEMM's CPU kernel forgets to divide the gradient by the length.
    """
    world_size, rank = dist.get_world_size(), dist.get_rank()
    model, stock = sharded(case), sharded(case.only("table_wise"))
    tables = [initial_weight(case, i).requires_grad_() for i in range(len(case.tables))]
    for step in range(case.steps):
        loss = torch.zeros(())
        for r in range(world_size):
            features = batch(case, step, r)
            for table, weight in zip(case.tables, tables, strict=True):
                bags = features[table.feature_names[0]]
                bag_of_id = torch.repeat_interleave(bags.lengths())
                sums = torch.zeros(len(bags.lengths()), table.dim).index_add(
                    0, bag_of_id, weight[bags.values()] * bags.weights()[:, None]
                )
                divisor = bags.lengths().clamp(min=1) if table.pooling == "mean" else 1
                out = sums / torch.as_tensor(divisor).view(-1, 1)
                name = table.feature_names[0]
                loss = loss + (out * coefficients(case, step, r, name, out)).sum()
                if r == rank and step == 0:
                    assert torch.equal(model(features)[name], out)
                    assert torch.equal(stock(features)[name], out)
        (loss / world_size).backward()
        train_step(case, model, step)
        with torch.no_grad():
            for weight in tables:
                assert weight.grad is not None
                weight -= case.learning_rate * weight.grad
                weight.grad = None
    for table, weight in zip(case.tables, tables, strict=True):
        key = f"sparse.embedding_bags.{table.name}.weight"
        for where, part in local_parts(model.state_dict()[key]):
            assert torch.equal(part, weight.detach()[where])


def test_weighted_means(cluster_2: Cluster) -> None:
    case = Case(tables=MIXED_DIMS, batch_sizes=(5, 5), weighted=True)
    cluster_2.run(train_weighted_means, case)


def test_int32_ids(cluster_2: Cluster) -> None:
    case = Case(tables=MIXED_DIMS, batch_sizes=(5, 4), id_dtype="int32", optimizer="adagrad")
    cluster_2.run(run_and_check, case)


def test_several_features_per_table_and_tables_per_feature(cluster_2: Cluster) -> None:
    case = Case(
        tables=(
            Table("a", 20, features=("x", "y")),
            Table("b", 30, features=("y", "z"), pooling="mean"),
            Table("c", 25, dim=16, features=("x", "z", "w")),
        ),
        batch_sizes=(4, 7),
        optimizer="rowwise_adagrad",
    )
    cluster_2.run(run_and_check, case, also_stock=False)


@pytest.mark.parametrize("rows_per_rank", [(0, 50), (50, 0), (1, 49), (37, 13)])
def test_uneven_row_ranges(cluster_2: Cluster, rows_per_rank: tuple[int, ...]) -> None:
    case = Case(
        tables=(Table("a", 50, rows_per_rank=rows_per_rank), Table("b", 3), Table("c", 1)),
        batch_sizes=(6, 6),
        optimizer="adagrad",
    )
    cluster_2.run(run_and_check, case)


def test_fewer_rows_than_ranks(cluster_4: Cluster) -> None:
    case = Case(tables=(Table("a", 1), Table("b", 2), Table("c", 5)), batch_sizes=(3, 2, 3, 4))
    cluster_4.run(run_and_check, case)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_fp16_weights(cluster_2: Cluster, optimizer: str) -> None:
    case = Case(
        tables=(Table("a", 50, dtype="fp16"), Table("b", 20), Table("c", 9, dtype="fp16")),
        batch_sizes=(5, 4),
        optimizer=optimizer,
    )
    cluster_2.run(run_and_check, case)


def test_fp16_outputs(cluster_2: Cluster) -> None:
    case = Case(tables=MIXED_DIMS, batch_sizes=(5, 4), output_dtype="fp16")
    cluster_2.run(run_and_check, case)


@pytest.mark.parametrize("world_size", [2, 4])
def test_variable_batch_per_feature(clusters: Callable[[int], Cluster], world_size: int) -> None:
    case = Case(
        tables=MIXED_DIMS,
        batch_sizes=(5, 4, 6, 3)[:world_size],
        vbe=True,
        optimizer="rowwise_adagrad",
    )
    clusters(world_size).run(run_and_check, case)


def run_with_64_bit_keys(case: Case) -> None:
    """As in a key space of more than 2^31 rows, which would not fit into memory here."""
    limit, layout.INT32_MAX = layout.INT32_MAX, 10
    try:
        run_and_check(case)
        sparse = sharded(case).module.sparse
        assert sparse.fused.layout.key_dtype == torch.int64
    finally:
        layout.INT32_MAX = limit


def test_64_bit_keys(cluster_2: Cluster) -> None:
    case = Case(tables=MIXED_DIMS, batch_sizes=(5, 4), optimizer="rowwise_adagrad")
    cluster_2.run(run_with_64_bit_keys, case)


def train_without_gradient_division(case: Case) -> None:
    """Then gradients are sums over ranks: as a learning rate that many times larger."""
    set_gradient_division(False)
    try:
        ranks = dist.get_world_size()
        rates = [case.learning_rate * ranks] * case.steps
        run = unsharded_run(case, ranks, learning_rates=rates)
        model = sharded(case)
        check(case, run, [train_step(case, model, step) for step in range(case.steps)], model)
    finally:
        set_gradient_division(True)


def test_gradient_division_can_be_off(cluster_2: Cluster) -> None:
    cluster_2.run(train_without_gradient_division, Case(tables=MIXED_DIMS, batch_sizes=(5, 5)))


@pytest.mark.parametrize("batch_sizes", [(0, 4), (4, 0), (0, 0)])
def test_empty_variable_batches(cluster_2: Cluster, batch_sizes: tuple[int, ...]) -> None:
    cluster_2.run(run_and_check, Case(tables=MIXED_DIMS, batch_sizes=batch_sizes, vbe=True))


def variable_batches_in_changing_order(case: Case) -> None:
    model, features = sharded(case), batch(case, 0, dist.get_rank())
    want = model(features)
    names, indices = features.inverse_indices()
    for order in ([1, 0, 3, 2], [0, 1, 2, 3], [3, 1, 0, 2]):
        shuffled = features.permute(order)
        for inverse_order in (order, order[::-1]):
            shuffled._inverse_indices = (
                [names[i] for i in inverse_order],
                indices[torch.tensor(inverse_order)],
            )
            got = model(shuffled)
            assert all(torch.equal(want[name], got[name]) for name in want)


@pytest.mark.parametrize("kind", ["ebc", "ec"])
def test_order_of_variable_batches_may_change(cluster_2: Cluster, kind: str) -> None:
    tables = tuple(Table(t.name, t.rows, 8 if kind == "ec" else t.dim) for t in MIXED_DIMS)
    case = Case(tables=tables, batch_sizes=(5, 4), vbe=True, kind=kind)
    cluster_2.run(variable_batches_in_changing_order, case)
