"""Gradients of places from all ranks: the sums that torch has, in the order of the ranks."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("triton")
from tests.core.gpu.device import kernels_of

sum_replicas = kernels_of("replica_sums").sum_replicas


def check(
    capacity: int, dim: int, of_ranks: list[torch.Tensor], dtype: torch.dtype, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    gradients = [torch.randn(len(own), dim, generator=generator).to(dtype) for own in of_ranks]
    counts = [len(own) for own in of_ranks]
    # What is before and between the pieces is not looked at.
    messages, place_starts = torch.full((3,), -9, dtype=torch.int32), []
    rows, row_starts = torch.full((5,), float("nan"), dtype=dtype), []
    for own, values in zip(of_ranks, gradients, strict=True):
        place_starts.append(messages.numel())
        row_starts.append(rows.numel())
        messages = torch.cat([messages, own.int(), messages[:1]])
        rows = torch.cat([rows, values.flatten(), rows[:2]])
    places, sums = sum_replicas(messages, place_starts, counts, rows, row_starts, dim, capacity)
    wanted = torch.zeros(capacity, dim)
    for own, values in zip(of_ranks, gradients, strict=True):
        wanted[own.long()] += values.float()
    named = torch.cat(of_ranks).unique().long()
    is_left = places < capacity
    assert places.dtype == torch.int64 and sums.dtype == torch.float32
    assert sorted(places[is_left].tolist()) == named.tolist()
    assert (places[~is_left] == capacity).all() and not sums[~is_left].any()
    assert torch.equal(sums[is_left], wanted[places[is_left]])


@settings(max_examples=25)
@given(st.data())
def test_sums_are_in_the_order_of_the_ranks_to_the_last_bit(data: st.DataObject) -> None:
    capacity = data.draw(st.integers(1, 40))
    dim = data.draw(st.sampled_from([1, 4, 12, 64, 100]))
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 99)))
    of_ranks = [
        torch.randperm(capacity, generator=generator)[: data.draw(st.integers(0, capacity))]
        for _ in range(data.draw(st.integers(1, 5)))
    ]
    dtype = data.draw(st.sampled_from([torch.float32, torch.float16, torch.bfloat16]))
    check(capacity, dim, of_ranks, dtype, seed=capacity)


def test_what_is_noted_of_another_batch_is_not_believed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The memory of notes is not cleared: whatever it holds, sums are those of this batch."""
    made = torch.empty

    def filled(*args: object, **kwargs: object) -> torch.Tensor:
        return made(*args, **kwargs).fill_(1)  # type: ignore[call-overload]

    monkeypatch.setattr(torch, "empty", filled)
    check(9, 4, [torch.tensor([3, 8, 0]), torch.tensor([5, 3])], torch.float32, seed=1)


def test_more_places_than_a_program_takes() -> None:
    of_ranks = [torch.arange(1000), torch.arange(999, 300, -1), torch.arange(0, 1000, 3)]
    check(1000, 128, of_ranks, torch.float32, seed=2)


def test_no_places() -> None:
    check(4, 4, [torch.arange(0), torch.arange(0)], torch.float32, seed=3)
