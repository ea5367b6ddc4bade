"""Counts of what a batch asks for, by hand."""

import numpy as np
import pytest
import torch
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from fusedrec_torchrec.bench.requests import TableRequests
from fusedrec_torchrec.bench.systems import balanced

# Six bags: (1 2), (2 1), (1 2), (), (5), (5).
BATCH = KeyedJaggedTensor(
    keys=["t"],
    values=torch.tensor([1, 2, 2, 1, 1, 2, 5, 5]),
    lengths=torch.tensor([2, 2, 2, 0, 1, 1]),
)


def test_bags_differ_in_order_and_empty_ones_ask_for_nothing() -> None:
    asked = TableRequests.count(BATCH, "t", sequence=False)
    assert asked.bags == 6
    assert asked.distinct_bags == 3
    assert asked.distinct_rows.tolist() == [1, 2, 5]
    assert asked.least == 3


def test_the_least_are_rows_or_bags_whichever_are_fewer() -> None:
    ids = np.arange(10)
    assert TableRequests(ids, bags=9, distinct_rows=ids, distinct_bags=4).least == 4
    assert TableRequests(ids, bags=9, distinct_rows=ids[:2], distinct_bags=4).least == 2
    assert TableRequests(ids, bags=None, distinct_rows=ids, distinct_bags=4).least == 10


@pytest.mark.parametrize(
    ("sharding_type", "low", "high"),
    [
        ("fused_row_wise", 2, 1),  # rows 1 and 2; row 5
        ("fused_table_wise", 3, 3),
        ("fused_column_wise", 3, 3),
        ("table_wise", 6, 6),
        ("row_wise", 6, 6),
    ],
)
def test_units_of_a_shard(sharding_type: str, low: int, high: int) -> None:
    asked = TableRequests.count(BATCH, "t", sequence=False)
    assert asked.units(sharding_type, 0, 3) == low
    assert asked.units(sharding_type, 3, 3) == high


def test_units_of_sequences() -> None:
    asked = TableRequests.count(BATCH, "t", sequence=True)
    assert asked.units("row_wise", 0, 3) == 6
    assert asked.units("row_wise", 3, 3) == 2
    assert asked.units("fused_row_wise", 0, 3) == 2


def test_tables_are_dealt_so_that_loads_are_balanced() -> None:
    loads = [1.0, 100.0, 50.0, 49.0, 1.0, 2.0]
    owners = balanced(loads, 2)
    totals = [sum(load for load, o in zip(loads, owners, strict=True) if o == r) for r in (0, 1)]
    assert abs(totals[0] - totals[1]) <= 1
    assert balanced([5.0], 4) == [0]
    assert sorted(balanced([1.0] * 8, 4)) == [0, 0, 1, 1, 2, 2, 3, 3]
