"""Long bags are looked up table by table, and nothing else changes."""

from collections.abc import Callable, Sequence
from typing import Any
from unittest import mock

import pytest
import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from hypothesis import given, settings
from hypothesis import strategies as st

from fusedrec_torchrec.compat.table_layout import TableLayout
from fusedrec_torchrec.core import operators
from fusedrec_torchrec.exchange import large_lookups
from fusedrec_torchrec.exchange.asked import Asked
from fusedrec_torchrec.exchange.large_lookups import TableLookup
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
    return Asked(rows, lengths, weights)


@st.composite
def requests(draw: st.DrawFn) -> tuple[list[int], list[list[list[list[int]]]]]:
    table_rows = draw(st.lists(st.integers(1, 6), min_size=1, max_size=5))
    ranks = draw(st.integers(1, 4))

    def bags(rows: int) -> st.SearchStrategy[list[list[int]]]:
        return st.lists(st.lists(st.integers(0, rows - 1), min_size=1, max_size=4), max_size=4)

    return table_rows, [[draw(bags(rows)) for rows in table_rows] for _ in range(ranks)]


@settings(max_examples=60, deadline=None)
@given(
    requests(),
    st.sampled_from([0, 2, 100]),
    st.booleans(),
    st.sampled_from(
        [EmbOptimType.EXACT_SGD, EmbOptimType.EXACT_ADAGRAD, EmbOptimType.EXACT_ROWWISE_ADAGRAD]
    ),
    st.booleans(),
)
def test_tables_give_what_one_table_gives(
    request: tuple[list[int], list[list[list[list[int]]]]],
    call: int,
    weighted: bool,
    optimizer: EmbOptimType,
    native: bool,
) -> None:
    table_rows, bags = request
    starts = [sum(table_rows[:t]) for t in range(len(table_rows))]
    asked = asked_of(bags, starts, weighted)
    units = [sum(map(len, of_rank)) for of_rank in bags]
    per_table = [sum(len(of_rank[t]) for of_rank in bags) for t in range(len(starts))]
    with mock.patch.multiple(large_lookups, SMALLEST=1, LONG=1, CALL=call):
        by_table = TableLookup.of(asked, units, torch.tensor(starts))
    if by_table is None:
        assert len(table_rows) == 1 or not sum(units)
        return
    parts = by_table.parts
    assert sorted(t for part in parts for t in part.tables) == [
        t for t, number in enumerate(per_table) if number
    ]
    for part in parts:
        most = max(per_table[t] for t in part.tables)
        assert part.units_C.numel() == most * len(part.tables)
        assert sum(most - per_table[t] for t in part.tables) <= call
    one, several = (bucket(table_rows, optimizer) for _ in range(2))

    def look_up_tables(tables: Sequence[int], of_tables: Asked) -> torch.Tensor:
        with TableLayout(several, tables).shown():
            looked_up: torch.Tensor = several(
                of_tables.rows_R, of_tables.offsets_U1, of_tables.weights_R
            )
        return looked_up

    for _ in range(2):
        whole = one(asked.rows_R, asked.offsets_U1, asked.weights_R)
        available = operators.available_on(torch.device("cpu")) and native
        with mock.patch.object(operators, "available_on", return_value=available):
            in_order = by_table.look_up(look_up_tables)
            gradient = torch.arange(whole.numel()).view_as(whole).float().remainder(5)
            whole.backward(gradient)
            in_order.backward(gradient)
        assert in_order.equal(whole)
        assert several.weights_host.equal(one.weights_host)
        for states in zip(
            one.split_optimizer_states(), several.split_optimizer_states(), strict=True
        ):
            for state, other in zip(*states, strict=True):
                assert state.equal(other)


def test_a_table_shows_itself_as_before_after_an_error() -> None:
    table = bucket([3, 4], EmbOptimType.EXACT_ADAGRAD)
    layout = TableLayout(table, [0, 1])

    def shown() -> tuple[int, list[int], list[int]]:
        return table.total_D, table.weights_offsets.tolist(), table.momentum1_offsets.tolist()

    before = shown()

    def fail() -> None:
        with layout.shown():
            assert shown() == (8, [0, 12], [0, 12])
            raise RuntimeError("no memory")

    with pytest.raises(RuntimeError, match="no memory"):
        fail()
    assert shown() == before == (4, [0], [0])


def test_few_ids_and_short_bags_are_looked_up_as_one_table() -> None:
    asked = asked_of([[[[0, 1]], [[1]]]], [0, 2], weighted=False)
    of = (asked, [2], torch.tensor([0, 2]))
    with mock.patch.multiple(large_lookups, SMALLEST=4, LONG=1):
        assert TableLookup.of(*of) is None
    with mock.patch.multiple(large_lookups, SMALLEST=1, LONG=2):
        assert TableLookup.of(*of) is None
    with mock.patch.multiple(large_lookups, SMALLEST=3, LONG=1.5):
        assert TableLookup.of(*of) is not None


def test_units_that_alternate_between_tables_are_looked_up_as_one_table() -> None:
    """Columns of one table on one rank are asked for in turn."""
    asked = Asked(torch.tensor([0, 2, 1, 3]), torch.ones(4, dtype=torch.int64))
    with mock.patch.multiple(large_lookups, SMALLEST=1, LONG=1):
        assert TableLookup.of(asked, [4], torch.tensor([0, 2])) is None


def run_counted(case: Case, train: Callable[[Case], None] = run_and_check) -> None:
    """Trains, and checks that bags were looked up table by table."""
    of = TableLookup.of
    parts = []

    def counted(*args: Any) -> TableLookup | None:
        by_table = of(*args)
        parts.append(0 if by_table is None else len(by_table.parts))
        return by_table

    with mock.patch.object(TableLookup, "of", counted):
        train(case)
    assert max(parts) > 0


def run_by_table(case: Case, train: Callable[[Case], None] = run_and_check) -> None:
    """Trains with tables of a few ids, in one call or several."""
    with mock.patch.multiple(large_lookups, SMALLEST=1, LONG=1, CALL=8):
        run_counted(case, train)


@pytest.mark.parametrize("optimizer", ["sgd", "adagrad", "rowwise_adagrad"])
@pytest.mark.parametrize("weighted", [False, True])
def test_training_by_table(
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
    clusters(2).run(run_by_table, case)


def test_training_with_long_bags(cluster_2: Cluster) -> None:
    tables = tuple(Table(name, 3000, dim=4, sharding="fused_table_wise") for name in "abcd")
    case = Case(tables=tables, batch_sizes=(1000, 1000), lengths=(180,), skew=0.0, steps=2)
    cluster_2.run(run_counted, case)
