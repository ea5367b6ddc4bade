"""Counts in bounded memory, with the error they promise."""

from collections import Counter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fusedrec_torchrec.access.heavy_hitters import HeavyHitters

streams = st.lists(st.lists(st.integers(0, 12), max_size=30), max_size=8)


def check(hitters: HeavyHitters, true: Counter[int]) -> None:
    keys, counts = hitters.content()
    assert keys.numel() <= hitters.counters
    assert hitters.total == true.total()
    assert hitters.error <= hitters.total / (hitters.counters + 1)
    found = dict(zip(keys.tolist(), counts.tolist(), strict=True))
    for key, count in true.items():
        assert count - hitters.error <= found.get(key, 0) <= count
    assert counts.tolist() == sorted(counts.tolist(), reverse=True)


@settings(deadline=None)
@given(streams, st.integers(1, 9))
def test_counts_are_too_low_by_at_most_the_error(stream: list[list[int]], counters: int) -> None:
    hitters, true = HeavyHitters(counters), Counter[int]()
    for keys in stream:
        hitters.add(torch.tensor(keys, dtype=torch.int32))
        true.update(keys)
    check(hitters, true)


@settings(deadline=None)
@given(streams, streams, st.integers(1, 9))
def test_merging_keeps_the_promise(
    one: list[list[int]], other: list[list[int]], counters: int
) -> None:
    summaries, true = [HeavyHitters(counters), HeavyHitters(counters)], Counter[int]()
    for hitters, stream in zip(summaries, (one, other), strict=True):
        for keys in stream:
            hitters.add(torch.tensor(keys, dtype=torch.int64))
            true.update(keys)
    first, second = summaries
    first.merge(*second.content(), second.total, second.error)
    check(first, true)


def test_fading_forgets() -> None:
    hitters = HeavyHitters(4)
    hitters.add(torch.tensor([1, 1, 1, 1, 2, 2, 3]))
    hitters.fade(0.5)
    assert [t.tolist() for t in hitters.content()] == [[1, 2], [2, 1]]
    hitters.fade(0.0)
    assert hitters.content()[0].numel() == 0


def test_padding_does_not_count() -> None:
    plain, padded = HeavyHitters(3), HeavyHitters(3, padding=9)
    for keys in ([1, 2, 2], [1, 3, 4, 5], [1]):
        plain.add(torch.tensor(keys))
        padded.add(torch.tensor(keys + [9] * 7))
    for got, want in zip(padded.content(), plain.content(), strict=True):
        assert torch.equal(got, want)
    assert (padded.total, padded.error) == (plain.total, plain.error)


def test_no_counters() -> None:
    with pytest.raises(ValueError, match="counters is 0, must be at least 1"):
        HeavyHitters(0)
