"""Sums of rows by bag, and of gradients by row: as torch has them."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("triton")
from tests.core.gpu.device import kernels_of

sums = kernels_of("sums")

Case = dict[str, Any]


@st.composite
def cases(draw: st.DrawFn) -> Case:
    width, lines = draw(st.integers(1, 3)), draw(st.integers(0, 4))
    bags, rows = width * lines, draw(st.integers(1, 7))
    one_each = draw(st.booleans())
    if one_each:  # the number of rows stands for none
        ids, offsets = [draw(st.integers(0, rows)) for _ in range(bags)], None
    else:
        lengths = [draw(st.integers(0, 5)) for _ in range(bags)]
        offsets = torch.tensor([0, *lengths]).cumsum(0).int()
        ids = [draw(st.integers(0, rows - 1)) for _ in range(sum(lengths))]
    generator = torch.Generator().manual_seed(draw(st.integers(0, 99)))
    return {
        "rows": rows,
        "dim": draw(st.sampled_from([4, 8, 12, 64, 100])),
        "ids": torch.tensor(ids, dtype=torch.int32),
        "offsets": offsets,
        "weights": torch.rand(len(ids), generator=generator) if draw(st.booleans()) else None,
        "divisor": torch.rand(bags, generator=generator) + 1 if draw(st.booleans()) else None,
        "width": width,
        "lines": lines,
        "column": draw(st.sampled_from([0, 4])),
        "scattered": draw(st.booleans()),
        "generator": generator,
    }


def reference(case: Case) -> torch.Tensor:
    """The matrix [bags, rows] that turns rows into bags."""
    bags = case["width"] * case["lines"]
    matrix = torch.zeros(bags, case["rows"] + 1)
    offsets = torch.arange(bags + 1) if case["offsets"] is None else case["offsets"]
    bag = torch.arange(bags).repeat_interleave(offsets.diff())
    weights = torch.ones(len(bag)) if case["weights"] is None else case["weights"]
    matrix.index_put_((bag, case["ids"].long()), weights, accumulate=True)
    if case["divisor"] is not None:
        matrix /= case["divisor"][:, None]
    return matrix[:, :-1]


def addresses_of(case: Case) -> tuple[torch.Tensor | None, int]:
    """Rows lie one after another, or here and there."""
    if not case["scattered"]:
        return None, case["rows"] * case["dim"]
    order = torch.randperm(case["rows"], generator=case["generator"])
    return order * (case["dim"] + 4) + 4, case["rows"] * (case["dim"] + 4) + 4


def columns(case: Case, matrix: torch.Tensor) -> torch.Tensor:
    end = case["column"] + case["width"] * case["dim"]
    return matrix[:, case["column"] : end].reshape(-1, case["dim"])


def picked(case: Case, flat: torch.Tensor, addresses: torch.Tensor | None) -> torch.Tensor:
    at = torch.arange(case["rows"]) * case["dim"] if addresses is None else addresses
    return flat[at[:, None] + torch.arange(case["dim"])]


@settings(max_examples=40, deadline=None)
@given(cases())
def test_bags_are_summed_into_their_columns(case: Case) -> None:
    addresses, size = addresses_of(case)
    flat = torch.randn(size, generator=case["generator"])
    out = torch.full((case["lines"], case["column"] + case["width"] * case["dim"] + 3), 5.0)
    sums.bag_sums(
        flat, addresses, case["dim"], case["ids"], case["offsets"], case["weights"],
        case["divisor"], case["width"], case["column"], out,
    )  # fmt: skip
    want = reference(case) @ picked(case, flat, addresses)
    torch.testing.assert_close(columns(case, out), want)
    assert (out[:, : case["column"]] == 5).all() and (out[:, -3:] == 5).all()


@settings(max_examples=40, deadline=None)
@given(cases())
def test_gradients_are_summed_by_row(case: Case) -> None:
    addresses, size = addresses_of(case)
    shape = (case["lines"], case["column"] + case["width"] * case["dim"] + 3)
    gradient = torch.randn(shape, generator=case["generator"])
    out = torch.zeros(size)
    sums.row_sums(
        gradient, case["width"], case["column"], case["ids"], case["offsets"], case["weights"],
        case["divisor"], addresses, case["rows"], case["dim"], 0.5, out,
    )  # fmt: skip
    want = 0.5 * reference(case).t() @ columns(case, gradient)
    torch.testing.assert_close(picked(case, out, addresses), want)
    if addresses is not None:
        touched = torch.zeros(size, dtype=torch.bool)
        touched[addresses[:, None] + torch.arange(case["dim"])] = True
        assert (out[~touched] == 0).all()


def test_a_long_bag_is_shared_by_programs() -> None:
    ids = torch.arange(1000, dtype=torch.int32) % 7
    out = torch.zeros(7 * 4)
    sums.row_sums(
        torch.ones(1, 4), 1, 0, ids, torch.tensor([0, 1000]).int(), None, None, None, 7, 4, 1.0, out
    )
    assert out.view(7, 4)[:, 0].tolist() == torch.bincount(ids.long()).tolist()


@settings(max_examples=30, deadline=None)
@given(st.lists(st.lists(st.integers(0, 5), min_size=2, max_size=2), min_size=1, max_size=4))
def test_addresses_of_rows_of_two_buckets(counts: list[list[int]]) -> None:
    dims = [4, 12]
    flat = [n for row in counts for n in row]
    want: list[list[int]] = [[], []]
    at = 0
    for row in counts:
        for k, n in enumerate(row):
            want[k] += [at + i * dims[k] for i in range(n)]
            at += n * dims[k]
    got = sums.row_addresses(torch.empty(0), flat, dims)
    assert got.tolist() == want[0] + want[1]
