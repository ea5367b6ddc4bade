"""Lookups of very many ids are cut between tables, and nothing else changes."""

from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from hypothesis import given, settings
from hypothesis import strategies as st

from fusedrec_torchrec.exchange import large_lookups
from fusedrec_torchrec.exchange.asked import Asked
from fusedrec_torchrec.exchange.large_lookups import PartedLookup
from tests.case import Case, Table
from tests.cluster import Cluster
from tests.exchange.test_lookup import bucket
from tests.parity import run_and_check


def asked_of(bags: list[list[list[list[int]]]], starts: list[int], weighted: bool) -> Asked:
    """What requesters ask for: bags of rows of each table of each requester."""
    units = [
        [starts[t] + row for row in bag]
        for of_rank in bags
        for t, of_table in enumerate(of_rank)
        for bag in of_table
    ]
    lengths = torch.tensor([len(bag) for bag in units], dtype=torch.int32)
    rows = torch.tensor([row for bag in units for row in bag], dtype=torch.int32)
    weights = torch.arange(rows.numel()).remainder(3).float() if weighted else None
    return Asked(rows, torch.ops.fbgemm.asynchronous_complete_cumsum(lengths), weights)


@st.composite
def requests(draw: st.DrawFn) -> tuple[list[int], list[list[list[list[int]]]]]:
    table_rows = draw(st.lists(st.integers(1, 6), min_size=1, max_size=5))
    ranks = draw(st.integers(1, 4))

    def bags(rows: int) -> st.SearchStrategy[list[list[int]]]:
        return st.lists(st.lists(st.integers(0, rows - 1), min_size=1, max_size=4), max_size=4)

    return table_rows, [[draw(bags(rows)) for rows in table_rows] for _ in range(ranks)]


@settings(max_examples=40, deadline=None)
@given(requests(), st.integers(1, 8), st.booleans())
def test_parts_give_what_one_call_gives(
    request: tuple[list[int], list[list[list[list[int]]]]], part: int, weighted: bool
) -> None:
    table_rows, bags = request
    starts = [sum(table_rows[:t]) for t in range(len(table_rows))]
    asked = asked_of(bags, starts, weighted)
    units = [sum(map(len, of_rank)) for of_rank in bags]
    ids = [sum(len(bag) for of_rank in bags for bag in of_rank[t]) for t in range(len(starts))]
    with mock.patch.multiple(large_lookups, SMALLEST=1, PART=part):
        parted = PartedLookup.cut(asked, units, torch.tensor(starts))
    if parted is None:
        assert sum(ids) < 2 * part or sum(n > 0 for n in ids) < 2 or max(ids) > sum(ids) - part
        return
    assert all(piece.rows_R.numel() >= part for piece in parted.parts)
    results = []
    for pieces in ([asked], parted.parts):
        table = bucket(table_rows, EmbOptimType.EXACT_SGD)
        looked_up = [table(p.rows_R, p.offsets_U1, p.weights_R) for p in pieces]
        pooled = looked_up[0] if len(pieces) == 1 else parted.joined(looked_up)
        pooled.backward(torch.arange(pooled.numel()).view_as(pooled).float())
        results.append((pooled.detach(), table.weights_host.detach()))
    (whole, whole_weights), (joined, joined_weights) = results
    assert joined.equal(whole) and joined_weights.equal(whole_weights)


def test_few_ids_stay_in_one_call() -> None:
    asked = asked_of([[[[0, 1]], [[1]]]], [0, 2], weighted=False)
    assert PartedLookup.cut(asked, [2], torch.tensor([0, 2])) is None


def test_units_that_alternate_between_tables_stay_in_one_call() -> None:
    """Columns of one table on one rank are asked for in turn."""
    asked = Asked(torch.tensor([0, 2, 1, 3]), torch.arange(5))
    with mock.patch.multiple(large_lookups, SMALLEST=1, PART=1):
        assert PartedLookup.cut(asked, [4], torch.tensor([0, 2])) is None


def run_counted(case: Case) -> None:
    """Trains, and checks that there were parts."""
    cut = PartedLookup.cut
    parts = []

    def counted(*args: Any) -> PartedLookup | None:
        parted = cut(*args)
        parts.append(0 if parted is None else len(parted.parts))
        return parted

    with mock.patch.object(PartedLookup, "cut", counted):
        run_and_check(case)
    assert max(parts) > 1


def run_in_parts(case: Case) -> None:
    """Trains with parts of a few ids."""
    with mock.patch.multiple(large_lookups, SMALLEST=1, PART=8):
        run_counted(case)


@pytest.mark.parametrize("optimizer", ["sgd", "adagrad", "rowwise_adagrad"])
@pytest.mark.parametrize("weighted", [False, True])
def test_training_in_parts(
    clusters: Callable[[int], Cluster], optimizer: str, weighted: bool
) -> None:
    tables = tuple(Table(name, 30, sharding="fused_table_wise") for name in "abcdefgh")
    case = Case(
        tables=tables,
        batch_sizes=(9, 8),
        optimizer=optimizer,
        weighted=weighted,
        lengths=(0, 2, 5),
        repeated=True,
    )
    clusters(2).run(run_in_parts, case)


def test_training_with_a_million_ids(cluster_2: Cluster) -> None:
    tables = tuple(Table(name, 3000, dim=4, sharding="fused_table_wise") for name in "abcd")
    case = Case(tables=tables, batch_sizes=(1500, 1500), lengths=(180,), skew=0.0, steps=2)
    cluster_2.run(run_counted, case)
