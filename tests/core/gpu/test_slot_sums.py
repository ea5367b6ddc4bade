"""Sums of rows for all slots of a batch: as torch has them."""

from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("triton")
from tests.core.gpu.device import kernels_of

slot_sums = kernels_of("slot_sums")


@dataclass
class Batch:
    """Bags of slots of several buckets, and the rows that they are of."""

    batch: int
    dims: list[int]
    slots: torch.Tensor
    rows: list[torch.Tensor]
    addresses: torch.Tensor | None
    size: int
    ids: torch.Tensor
    offsets: torch.Tensor
    weights: torch.Tensor | None
    width: int
    generator: torch.Generator

    def matrix(self, slot: int) -> torch.Tensor:
        """Returns what turns all rows into the bags of a slot, [samples, rows]."""
        matrix = torch.zeros(self.batch, sum(map(len, self.rows)) + 1)
        mean = bool(self.slots[slot, 2])
        for b in range(self.batch):
            begin, end = self.offsets[slot * self.batch + b :][:2].tolist()
            for i in range(begin, end):
                weight = 1.0 if self.weights is None else float(self.weights[i])
                matrix[b, int(self.ids[i])] += weight / (end - begin if mean else 1)
        return matrix[:, :-1]

    def address(self, row: int, dim: int) -> int:
        return row * dim if self.addresses is None else int(self.addresses[row])

    def row_matrix(self, flat: torch.Tensor, dim: int) -> torch.Tensor:
        """Returns all rows as if they were of a dimension; those of others mean nothing."""
        padded = torch.cat([flat, torch.zeros(dim)])
        rows = sum(map(len, self.rows))
        return (
            torch.stack([padded[self.address(row, dim) :][:dim] for row in range(rows)])
            if rows
            else torch.zeros(0, dim)
        )


@st.composite
def batches(draw: st.DrawFn) -> Batch:
    generator = torch.Generator().manual_seed(draw(st.integers(0, 99)))
    dims = draw(st.lists(st.sampled_from([4, 12, 32, 64, 100]), min_size=1, max_size=3))
    batch = draw(st.integers(0, 5))
    slots, column, first, rows, ids, lengths = [], 0, 0, [], [], []
    for dim in dims:
        count = draw(st.integers(1, 6))
        rows.append(torch.arange(first, first + count))
        for _ in range(draw(st.integers(1, 3))):
            slots.append([dim, column, draw(st.integers(0, 1))])
            column += dim
            for _ in range(batch):
                lengths.append(draw(st.integers(0, 5)))
                own = torch.randint(count, (lengths[-1],), generator=generator)
                ids.append(own + first)
        first += count
    addresses, size = None, first * dims[0]
    if len(dims) > 1:  # in any order
        sizes = torch.tensor([dim for dim, own in zip(dims, rows, strict=True) for _ in own])
        order = torch.randperm(first, generator=generator)
        starts = sizes[order].cumsum(0) - sizes[order]
        addresses = torch.empty(first, dtype=torch.int64).scatter_(0, order, starts)
        size = int(sizes.sum())
    flat_ids = torch.cat([*ids, torch.empty(0, dtype=torch.int64)]).int()
    weights = torch.rand(flat_ids.numel(), generator=generator) if draw(st.booleans()) else None
    return Batch(
        batch, dims, torch.tensor(slots), rows, addresses, size, flat_ids,
        torch.tensor([0, *lengths]).cumsum(0).to(draw(st.sampled_from([torch.int32, torch.int64]))),
        weights, column, generator,
    )  # fmt: skip


@settings(max_examples=30, deadline=None)
@given(batches(), st.sampled_from([torch.float32, torch.float16]))
def test_bags_are_summed_into_the_columns_of_their_slots(batch: Batch, dtype: torch.dtype) -> None:
    flat = torch.randn(batch.size, generator=batch.generator).to(dtype)
    out = torch.full((batch.batch, batch.width + 3), 5.0, dtype=dtype)
    slot_sums.slot_bag_sums(
        flat, batch.addresses, batch.dims, batch.slots, batch.ids, batch.offsets,
        batch.weights, batch.batch, out,
    )  # fmt: skip
    for slot, (dim, column, _) in enumerate(batch.slots.tolist()):
        want = batch.matrix(slot) @ batch.row_matrix(flat.float(), dim)
        torch.testing.assert_close(out[:, column : column + dim], want.to(dtype))
    assert (out[:, batch.width :] == 5).all()


def of_variable_batch(batch: Batch) -> tuple[torch.Tensor, int, list[torch.Tensor]]:
    """Leaves out the last bags of some slots; returns slots, elements, and the bags' own weights.

    What is left out stays in the batch, where no slot finds it.
    """
    slots, column, matrices = [], 0, []
    for slot, (dim, _, mean) in enumerate(batch.slots.tolist()):
        stride = max(batch.batch - slot % 3, 0)
        slots.append([dim, column, mean, slot * batch.batch, stride])
        column += stride * dim
        matrices.append(batch.matrix(slot)[:stride])
    return torch.tensor(slots), column, matrices


@settings(max_examples=30, deadline=None)
@given(batches())
def test_bags_of_a_variable_batch_are_in_one_line(batch: Batch) -> None:
    slots, elements, matrices = of_variable_batch(batch)
    flat = torch.randn(batch.size, generator=batch.generator)
    out = torch.full((elements + 3,), 5.0)
    ids = (batch.ids, batch.offsets, batch.weights, batch.batch)
    slot_sums.slot_bag_sums(flat, batch.addresses, batch.dims, slots, *ids, out)
    for (dim, column, _, _, stride), matrix in zip(slots.tolist(), matrices, strict=True):
        own = slice(column, column + stride * dim)
        want = matrix @ batch.row_matrix(flat, dim)
        torch.testing.assert_close(out[own].view(stride, dim), want)
    assert (out[elements:] == 5).all()


@settings(max_examples=30, deadline=None)
@given(batches(), st.booleans())
def test_gradients_of_weights_are_products_of_rows_and_gradients(
    batch: Batch, varies: bool
) -> None:
    slots, width = batch.slots, batch.width
    gradient = torch.randn(batch.batch, width + 3, generator=batch.generator)
    if varies:
        slots, width, _ = of_variable_batch(batch)
        gradient = torch.randn(1, width + 3, generator=batch.generator)
    flat = torch.randn(batch.size, generator=batch.generator)
    out = torch.full((batch.ids.numel() + 2,), 5.0)
    slot_sums.slot_weight_sums(
        gradient, flat, batch.addresses, batch.dims, slots, batch.ids, batch.offsets,
        batch.batch, out,
    )  # fmt: skip
    want = torch.full_like(out, 5.0)
    for slot, (dim, column, mean, *more) in enumerate(slots.tolist()):
        first, stride = more or (slot * batch.batch, batch.batch)
        for b in range(stride):
            begin, end = batch.offsets[first + b :][:2].tolist()
            line = gradient[0, column + b * dim :] if varies else gradient[b, column:]
            for i in range(begin, end):
                address = batch.address(int(batch.ids[i]), dim)
                product = flat[address : address + dim] @ line[:dim]
                want[i] = product / (end - begin if mean else 1)
    torch.testing.assert_close(out, want)
