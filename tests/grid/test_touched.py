"""Rows that were used, each once, by two ways."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from fusedrec_torchrec.grid.touched import distinct, distinct_and_padding


@given(st.lists(st.integers(0, 9), max_size=20), st.sampled_from([10, 10_000]))
def test_padding_is_all_that_differs(numbers: list[int], rows: int) -> None:
    given_rows = torch.tensor(numbers, dtype=torch.int32)
    want = distinct(given_rows, rows).tolist()
    got = distinct_and_padding(given_rows, rows).tolist()
    assert got[: len(want)] == want == sorted(set(numbers))
    assert all(number == rows for number in got[len(want) :]) and len(got) <= len(numbers)
