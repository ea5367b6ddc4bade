"""Rows that replicas have used: lists of them, unions of lists, and means."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("triton")
from tests.core.gpu.device import kernels_of

touched = kernels_of("touched")


def counts_up_to(rows: torch.Tensor, ends: torch.Tensor) -> list[int]:
    return [int((rows < end).sum()) for end in ends]


def numbers(rows: int, size: int, seed: int) -> torch.Tensor:
    return torch.randint(rows, (size,), generator=torch.Generator().manual_seed(seed))


@settings(max_examples=20)
@given(st.data())
def test_a_list_has_every_row_once_in_ascending_order(data: st.DataObject) -> None:
    sizes = data.draw(st.lists(st.integers(1, 1500), min_size=1, max_size=4))
    ends = torch.tensor(sizes).cumsum(0)
    firsts, room = [0, *ends[:-1].tolist()], data.draw(st.integers(0, 9))
    lists = [
        numbers(size, data.draw(st.integers(0, 30)), seed=i).to(dtype)
        for i, (size, dtype) in enumerate(zip(sizes, [torch.int32, torch.int64] * 2, strict=False))
    ]
    message = touched.list_touched(lists, firsts, ends, sum(sizes), room)
    all_rows = torch.cat([own + first for own, first in zip(lists, firsts, strict=True)]).unique()
    header, listed = message.split([len(ends), len(message) - len(ends)])
    assert header.tolist() == counts_up_to(all_rows, ends)
    assert listed[: len(all_rows)].tolist() == all_rows.tolist()
    assert len(listed) >= room


def test_a_list_of_very_many_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Programs have larger shares then."""
    monkeypatch.setattr(touched, "MOST_PROGRAMS", 3)
    ends, own = torch.tensor([4096, 5000, 20_000]), numbers(20_000, 3000, seed=1)
    message = touched.list_touched([own], [0], ends, 20_000, 0)
    assert message[:3].tolist() == counts_up_to(own.unique(), ends)
    assert message[3:][: len(own.unique())].tolist() == own.unique().tolist()


@settings(max_examples=20)
@given(st.data())
def test_a_union_has_the_rows_of_all_messages(data: st.DataObject) -> None:
    sizes = data.draw(st.lists(st.integers(1, 700), min_size=1, max_size=3))
    ends, rows = torch.tensor(sizes).cumsum(0), sum(sizes)
    capacity = data.draw(st.integers(0, 40))
    lists = [
        numbers(rows, data.draw(st.integers(0, 40)), seed=i).unique()
        for i in range(data.draw(st.integers(1, 4)))
    ]
    messages = torch.full((len(lists), len(ends) + capacity), -7, dtype=torch.int32)
    for message, own in zip(messages, lists, strict=True):
        message[: len(ends)] = torch.tensor(counts_up_to(own, ends))
        message[len(ends) :][: len(own)] = own[:capacity]
    headers, union = touched.unite_touched(messages, ends, rows)
    wanted = torch.cat([own[:capacity] for own in lists]).unique()  # the others had no room
    assert headers.tolist() == [
        *messages[:, : len(ends)].flatten().tolist(),
        *counts_up_to(wanted, ends),
    ]
    assert union[: len(wanted)].tolist() == wanted.tolist()


@pytest.mark.parametrize("dim", [1, 4, 100, 300])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_means_are_quotients_to_the_last_bit(dim: int, dtype: torch.dtype) -> None:
    table = torch.randn(50, dim, generator=torch.Generator().manual_seed(dim)).to(dtype)
    wanted, rows = table.clone(), torch.tensor([103, 100, 149, 120], dtype=torch.int32)
    sums = torch.randn(4, dim, generator=torch.Generator().manual_seed(1)).to(dtype)
    wanted[rows.long() - 100] = (sums.float() / 3).to(dtype)
    touched.write_means(sums, rows, 100, 3, table)
    assert torch.equal(table, wanted)


def test_means_of_no_rows_change_nothing() -> None:
    table = torch.ones(2, 4)
    touched.write_means(torch.empty(0, 4), torch.empty(0, dtype=torch.int32), 0, 2, table)
    assert (table == 1).all()
