"""Weights that are bad, or that want gradients nobody can give, are an error on all ranks."""

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from tests.case import Case, Table, batch, sharded
from tests.cluster import Cluster
from tests.sharding.modules.test_bad_input import (
    TABLES,
    Spoil,
    rebuilt,
    spoil_and_go_on,
    tables_of,
)


def without_weights(features: KeyedJaggedTensor) -> object:
    return rebuilt(features, weights=None)


def integer_weights(features: KeyedJaggedTensor) -> object:
    return rebuilt(features, weights=features.weights().long())


def too_few_weights(features: KeyedJaggedTensor) -> object:
    return rebuilt(features, weights=features.weights()[:-1])


@pytest.mark.parametrize(
    ("spoil", "text"),
    [
        (without_weights, "weights are missing from the batch"),
        (integer_weights, "weights are torch.int64, must be a floating point type"),
        (too_few_weights, "one for each id"),
    ],
)
@pytest.mark.parametrize("types", ["rows", "rows and columns", "tables"])
def test_bad_weights(cluster_2: Cluster, spoil: Spoil, text: str, types: str) -> None:
    tables = tables_of(types, tuple(replace(t, pooling="sum") for t in TABLES))
    case = Case(tables=tables, batch_sizes=(6, 6), lengths=(1, 2), weighted=True)
    texts = cluster_2.run(spoil_and_go_on, case, spoil, bad_ranks=(1,), first=1)
    assert texts[0] == texts[1]
    assert text in texts[0]


def learned_weights(features: KeyedJaggedTensor) -> object:
    return rebuilt(features, weights=features.weights().clone().requires_grad_())


@pytest.mark.parametrize("types", ["tables", "rows and columns"])
@pytest.mark.parametrize("bad_ranks", [(1,), (0, 1)])
def test_learned_weights_where_owners_pool(
    cluster_2: Cluster, types: str, bad_ranks: tuple[int, ...]
) -> None:
    tables = tables_of(types, tuple(replace(t, pooling="sum") for t in TABLES))
    names = [t.name for t in tables if t.sharding != "fused_row_wise"]
    case = Case(tables=tables, batch_sizes=(6, 6), lengths=(1, 2), weighted=True)
    texts = cluster_2.run(spoil_and_go_on, case, learned_weights, bad_ranks=bad_ranks, first=1)
    assert texts[0] == texts[1]
    assert texts[0].startswith(
        f"bad input on rank {bad_ranks[0]}: weights require gradients, must not with tables "
        f"{names}, whose owners pool: the gradients of weights need the rows"
    )


@pytest.mark.parametrize("stock", ["table_wise", "row_wise", "data_parallel"])
@pytest.mark.parametrize("bad_ranks", [(1,), (0, 1)])
def test_learned_weights_beside_stock_tables(
    cluster_2: Cluster, stock: str, bad_ranks: tuple[int, ...]
) -> None:
    tables = (Table("a", 50), Table("b", 33, dim=16), Table("s", 20, sharding=stock))
    case = Case(tables=tables, batch_sizes=(6, 6), lengths=(1, 2), weighted=True)
    texts = cluster_2.run(spoil_and_go_on, case, learned_weights, bad_ranks=bad_ranks, first=1)
    assert texts[0] == texts[1]
    assert texts[0].startswith(
        f"bad input on rank {bad_ranks[0]}: weights require gradients, must not with tables "
        "['s'], which are not fused: beside them TorchRec loses the gradients of all weights"
    )


def learned_weights_without_gradients(case: Case) -> None:
    model, features = sharded(case), batch(case, 0, dist.get_rank())
    want = model(features)
    with torch.no_grad():
        got = model(learned_weights(features))
    assert all(torch.equal(want[name], got[name]) for name in want)


def test_learned_weights_are_looked_up_where_nobody_wants_gradients(cluster_2: Cluster) -> None:
    tables = tables_of("rows and columns", tuple(replace(t, pooling="sum") for t in TABLES))
    tables = (*tables, Table("s", 20, sharding="table_wise"))
    case = Case(tables=tables, batch_sizes=(6, 6), weighted=True)
    cluster_2.run(learned_weights_without_gradients, case)
