"""Pooling and its gradients, against the sums written out, in C++ and by torch's operators."""

from collections.abc import Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fusedrec_torchrec.core import native
from fusedrec_torchrec.core.buffers import Buffers
from fusedrec_torchrec.exchange.bags import Bags
from fusedrec_torchrec.exchange.pooling import pool


@pytest.fixture(
    params=[
        "torch",
        pytest.param(
            "native",
            marks=pytest.mark.skipif(not native.available(), reason="needs a C++ compiler"),
        ),
    ]
)
def operators(request: pytest.FixtureRequest) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(native, "available", lambda: request.param == "native")
        yield


def small_integers(*shape: int, seed: int) -> torch.Tensor:
    """Exact in any order of sums, and after a division by 1, 2 or 4."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(1, 5, shape, generator=generator).float() * 4


@st.composite
def problems(draw: st.DrawFn) -> dict[str, object]:
    kind = draw(st.sampled_from(["side by side", "one id each", "lines", "sequences"]))
    buckets = draw(st.integers(1, 3))
    dims = (
        [draw(st.sampled_from([4, 12, 20]))] * buckets
        if kind == "sequences"
        else draw(st.lists(st.sampled_from([4, 12, 20]), min_size=buckets, max_size=buckets))
    )
    ranks = draw(st.integers(1, 3))
    counts = [
        draw(st.lists(st.integers(0, 4), min_size=buckets, max_size=buckets)) for _ in range(ranks)
    ]
    for k in range(buckets):
        counts[0][k] += 1  # at least one row
    batch = draw(st.integers(1, 5))
    lengths, widths = [], []
    for _ in range(buckets):
        width = draw(st.integers(1, 3))
        bags = width * batch
        widths.append(width if kind in ("side by side", "one id each") else 0)
        lengths.append(
            [1] * bags
            if kind in ("one id each", "sequences")
            else draw(st.lists(st.sampled_from([0, 1, 2, 4]), min_size=bags, max_size=bags))
        )
    return {
        "kind": kind,
        "dims": dims,
        "counts": counts,
        "lengths": lengths,
        "widths": widths,
        "weighted": draw(st.booleans()),
        "mean": draw(st.booleans()) and kind in ("side by side", "lines"),
        "seed": draw(st.integers(0, 1000)),
    }


@given(problem=problems())
@settings(max_examples=150)
def test_outputs_and_gradients_of_rows_and_weights(
    operators: None, problem: dict[str, object]
) -> None:
    dims, counts, lengths, widths = (
        problem[key] for key in ("dims", "counts", "lengths", "widths")
    )
    assert isinstance(dims, list) and isinstance(counts, list)
    assert isinstance(lengths, list) and isinstance(widths, list)
    seed = int(str(problem["seed"]))
    generator = torch.Generator().manual_seed(seed)
    elements = sum(n * dim for row in counts for n, dim in zip(row, dims, strict=True))
    flat = small_integers(elements, seed=seed).requires_grad_()
    same_flat = flat.detach().clone().requires_grad_()
    weights: list[torch.Tensor | None] = []
    same_weights: list[torch.Tensor | None] = []
    bags, wanted = [], []
    for k, (dim, bag_lengths, width) in enumerate(zip(dims, lengths, widths, strict=True)):
        ids = sum(bag_lengths)
        rows_N = torch.randint(sum(row[k] for row in counts), (ids,), generator=generator)
        one_each = problem["kind"] in ("one id each", "sequences")
        bag_of_id = torch.arange(len(bag_lengths)).repeat_interleave(torch.tensor(bag_lengths))
        divisor = torch.tensor(bag_lengths).clamp(min=1).float() if problem["mean"] else None
        order = None
        if problem["kind"] == "side by side":
            order = torch.randperm(ids, generator=generator).int()
        weight = (
            small_integers(ids, seed=seed + k).requires_grad_() if problem["weighted"] else None
        )
        offsets = torch.tensor([0, *bag_lengths]).cumsum(0).int()
        bags.append(Bags(rows_N.int(), None if one_each else offsets, divisor, order, width=width))
        weights.append(weight)

        # The same written out: rows of all owners, gathered, weighted, summed, divided.
        pieces, start = [], 0
        for row in counts:
            for j, (n, d) in enumerate(zip(row, dims, strict=True)):
                if j == k:
                    pieces.append(same_flat[start : start + n * d].view(n, d))
                start += n * d
        terms = torch.cat(pieces)[rows_N]
        same_weight = None
        if weight is not None:
            same_weight = weight.detach().clone().requires_grad_()
            in_order = same_weight
            if order is not None:
                in_order = same_weight[order.long()]
            elif width:
                in_order = same_weight.view(width, -1).t().reshape(-1)
            terms = terms * in_order[:, None]
        same_weights.append(same_weight)
        sums = torch.zeros(len(bag_lengths), dim).index_add(0, bag_of_id, terms)
        sums = sums if divisor is None else sums / divisor[:, None]
        wanted.append(sums.view(-1, width * dim) if width else sums)
    out = pool(flat, counts, dims, weights, bags, Buffers())
    if all(widths):
        want = torch.cat(wanted, dim=1)
    elif len(set(dims)) == 1:
        want = torch.cat(wanted)
    else:
        want = torch.cat([each.flatten() for each in wanted])
    assert out.equal(want)
    gradient = small_integers(*out.shape, seed=seed + 7)
    out.backward(gradient)
    want.backward(gradient)
    assert flat.grad is not None and same_flat.grad is not None
    assert flat.grad.equal(same_flat.grad)
    for weight, same in zip(weights, same_weights, strict=True):
        if weight is not None and same is not None:
            assert weight.grad is not None and same.grad is not None
            assert weight.grad.equal(same.grad)


def test_rows_that_no_id_asks_for_get_no_gradient(operators: None) -> None:
    rows = torch.ones(12, requires_grad=True)
    bags = [Bags(torch.tensor([2, 2], dtype=torch.int32))]
    pool(rows, [[3]], [4], [None], bags, Buffers()).sum().backward()
    assert rows.grad is not None
    assert rows.grad.view(3, 4)[:, 0].tolist() == [0, 0, 2]


def test_large_outputs_equal_a_gather(operators: None) -> None:
    """Outputs beyond the cache are written past it."""
    rows, ids = small_integers(50, 64, seed=0), torch.randint(50, (140_000,), dtype=torch.int32)
    out = pool(rows.view(-1), [[50]], [64], [None], [Bags(ids)], Buffers())
    assert out.equal(rows[ids.long()])


@pytest.mark.skipif(not native.available(), reason="needs a C++ compiler")
def test_threads_do_not_change_sums() -> None:
    generator = torch.Generator().manual_seed(0)
    bags = [Bags(torch.randint(50, (4000,), generator=generator, dtype=torch.int32))]
    gradient, results = torch.randn(4000, 40, generator=generator), []
    before = torch.get_num_threads()
    try:
        for threads in (1, 3):
            torch.set_num_threads(threads)
            rows = torch.zeros(50 * 40, requires_grad=True)
            pool(rows, [[50]], [40], [None], bags, Buffers()).backward(gradient)
            results.append(rows.grad)
    finally:
        torch.set_num_threads(before)
    assert results[0] is not None and results[1] is not None
    assert results[0].equal(results[1])


def test_large_outputs_of_several_buckets_equal_a_gather(operators: None) -> None:
    """Past the cache, in columns side by side."""
    batch, counts, dims, widths = 30_000, [[20, 30]], [64, 16], [2, 3]
    flat = small_integers(20 * 64 + 30 * 16, seed=0)
    matrices = [flat[: 20 * 64].view(20, 64), flat[20 * 64 :].view(30, 16)]
    generator = torch.Generator().manual_seed(1)
    bags, wanted = [], []
    for matrix, width in zip(matrices, widths, strict=True):
        ids = torch.randint(matrix.size(0), (batch * width,), generator=generator)
        bags.append(Bags(ids.int(), width=width))
        wanted.append(matrix[ids].view(batch, -1))
    out = pool(flat, counts, dims, [None, None], bags, Buffers())
    assert out.equal(torch.cat(wanted, dim=1))


def test_outputs_may_be_written_into(operators: None) -> None:
    """As TorchRec does with those of feature-processed modules."""
    rows = small_integers(5000 * 8, seed=0).requires_grad_()
    for width in (0, 4):
        bags = [Bags(torch.arange(5000, dtype=torch.int32).repeat(4), width=width)]
        out = pool(rows, [[5000]], [8], [None], bags, Buffers())
        out.add_(1)
        out.sum().backward()
    assert rows.grad is not None and bool((rows.grad == 8).all())
