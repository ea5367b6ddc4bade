"""Sums of gradients by row for all slots of a batch: as torch has them."""

from dataclasses import replace

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

pytest.importorskip("triton")
from fusedrec_torchrec.core.gpu import segments
from tests.core.gpu.device import kernels_of
from tests.core.gpu.test_slot_sums import Batch, batches

row_gradients, row_numbers = kernels_of("row_gradients"), kernels_of("row_numbers")

LEFT = 7.0  # what is in memory before


@pytest.fixture(params=[(32, 64), (2, 4), (0, 2)], ids=["few ids", "pieces", "all in pieces"])
def limits(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sets how many ids are few, and how many are a piece."""
    for module in (segments, row_gradients):
        monkeypatch.setattr(module, "FEW", request.param[0])
        monkeypatch.setattr(module, "PIECE", request.param[1])


def row_ids(
    rows_N: torch.Tensor, generator: torch.Generator
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, int]:
    """Returns which ids a row has, in any order, and how many rows there are."""
    few, size = segments.FEW, segments.PIECE
    counts_U = torch.bincount(rows_N)
    rooms, cursors = torch.full((rows_N.numel(), 2), -9, dtype=torch.int32), [0, 0]
    for row in torch.randperm(counts_U.numel(), generator=generator).tolist():
        count = int(counts_U[row])
        if count > few:
            rooms[row, 0] = rows_N.numel() + size * cursors[1]
            cursors[1] += -(-count // size)
        else:
            rooms[row, 0] = cursors[0]
            cursors[0] += count
        rooms[row, 1] = count
    ranks = torch.zeros_like(rows_N)
    for row, count in enumerate(counts_U.tolist()):
        ranks[rows_N == row] = torch.randperm(count, generator=generator).int()
    assert cursors[1] <= segments.most_pieces(rows_N.numel())
    return ranks, rooms, torch.tensor(cursors, dtype=torch.int32), counts_U.numel()


def told(
    rows_N: torch.Tensor, generator: torch.Generator, batch: int, slots: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, int, int, int]:
    """Returns what the kernels are told of the rows of a batch whose slots have as many bags."""
    ranks, rooms, cursors, rows = row_ids(rows_N, generator)
    return ranks, rooms, cursors, batch, batch * slots, rows


def only_asked_rows(batch: Batch) -> Batch:
    """Returns the batch with no rows but those that have ids."""
    asked, ids = batch.ids.long().unique(return_inverse=True)
    addresses, size = batch.addresses, asked.numel() * batch.dims[0]
    if addresses is not None:
        addresses, size = addresses[asked], batch.size
    return replace(batch, ids=ids.int(), rows=[asked], addresses=addresses, size=size)


def wanted(batch: Batch, gradient: torch.Tensor, scale: float) -> torch.Tensor:
    want, is_written = torch.zeros(batch.size), torch.zeros(batch.size, dtype=torch.bool)
    for slot, (dim, column, _) in enumerate(batch.slots.tolist()):
        own = batch.matrix(slot).t() @ gradient[:, column : column + dim].float() * scale
        begin, end = (int(batch.offsets[s * batch.batch]) for s in (slot, slot + 1))
        for row in batch.ids[begin:end].unique().tolist():
            at = batch.address(row, dim)
            want[at : at + dim] += own[row]
            is_written[at : at + dim] = True
    return torch.where(is_written, want, LEFT)


@pytest.mark.usefixtures("limits")
@settings(
    max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(batches(), st.sampled_from([torch.float32, torch.float16]))
def test_gradients_are_summed_up_for_each_row(batch: Batch, dtype: torch.dtype) -> None:
    batch = only_asked_rows(batch)
    gradient = torch.randn(batch.batch, batch.width + 3, generator=batch.generator).to(dtype)
    out = torch.full((batch.size,), LEFT)
    row_gradients.slot_row_sums(
        gradient, batch.addresses, batch.dims, batch.slots, batch.ids, batch.offsets,
        batch.weights, *told(batch.ids, batch.generator, batch.batch, len(batch.slots)), 0.5, out,
    )  # fmt: skip
    torch.testing.assert_close(out, wanted(batch, gradient, 0.5))


@pytest.mark.usefixtures("limits")
@settings(
    max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(batches())
def test_gradients_of_a_variable_batch_are_in_one_line(batch: Batch) -> None:
    """Every slot has bags of its own number, which follow those of the slot before."""
    batch = only_asked_rows(batch)
    strides: list[int] = []
    slots, column, lengths, places = [], 0, [], []
    all_lengths = batch.offsets.diff()
    for slot, (dim, _, mean) in enumerate(batch.slots.tolist()):
        stride = max(batch.batch - slot % 3, 0)
        slots.append([dim, column, mean, sum(strides), stride])
        strides.append(stride)
        column += stride * dim
        first = slot * batch.batch
        lengths.append(all_lengths[first : first + stride])
        places.append(torch.arange(int(batch.offsets[first]), int(batch.offsets[first + stride])))
    kept = torch.cat(places) if places else torch.empty(0, dtype=torch.int64)
    asked, ids_N = batch.ids[kept].long().unique(return_inverse=True)
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), torch.cat(lengths).cumsum(0)])
    weights = None if batch.weights is None else batch.weights[kept]
    addresses = None if batch.addresses is None else batch.addresses[asked]
    size = batch.size if addresses is not None else asked.numel() * batch.dims[0]
    gradient = torch.randn(1, column + 3, generator=batch.generator)
    out, want = torch.full((size,), LEFT), torch.full((size,), LEFT)
    ranks, rooms, cursors, rows = row_ids(ids_N.int(), batch.generator)
    row_gradients.slot_row_sums(
        gradient, addresses, batch.dims, torch.tensor(slots), ids_N.int(), offsets, weights,
        ranks, rooms, cursors, batch.batch, sum(strides), rows, 0.5, out,
    )  # fmt: skip
    for dim, column, mean, first, stride in slots:
        for b in range(stride):
            begin, end = offsets[first + b : first + b + 2].tolist()
            value = gradient[0, column + b * dim :][:dim] / 2 / (end - begin if mean else 1)
            for i in range(begin, end):
                row = int(ids_N[i])
                at = row * dim if addresses is None else int(addresses[row])
                own = want[at : at + dim]
                own.copy_(torch.where(own == LEFT, 0.0, own))
                own += value if weights is None else value * weights[i]
    torch.testing.assert_close(out, want)


@pytest.mark.parametrize("rows", [1, 7])
@pytest.mark.parametrize("length", [1, 400])
def test_a_row_with_very_many_ids_is_shared_by_programs(
    rows: int, length: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Goes from ids to sums: one long bag, and many short ones; two programs share pieces."""
    monkeypatch.setattr(row_gradients, "WORKERS", 2)
    ids, bags = torch.arange(400) % rows, 400 // length
    offsets = torch.arange(0, 401, length, dtype=torch.int32)
    table = (torch.tensor([rows]), None, torch.tensor([[0]]), torch.tensor([[0]]))
    keys_U, rows_N, counts_P, _, ranks_N, segments_U2, cursors = row_numbers.number_batch_rows(
        ids, offsets, bags, *table, torch.tensor([0, rows], dtype=torch.int32), None
    )
    assert counts_P.tolist() == [rows] and int(cursors[1]) == rows * -(-400 // rows // 64)
    gradient, out = torch.ones(bags, 8), torch.full((8 * rows,), LEFT)
    slots = torch.tensor([[8, 0, 1]])
    row_gradients.slot_row_sums(
        gradient, None, [8], slots, rows_N, offsets, None, ranks_N, segments_U2,
        cursors, bags, bags, rows, 1.0, out,
    )  # fmt: skip
    want = torch.bincount(ids)[keys_U[:rows].long()] / length
    torch.testing.assert_close(out.view(rows, 8), want[:, None].expand(rows, 8))


def test_rows_with_many_ids_are_left_to_pieces() -> None:
    """If they were not, two programs would write to them; the interpreter runs one at a time."""
    ids = torch.tensor([0] * (segments.FEW + 1) + [1] * segments.FEW, dtype=torch.int32)
    ranks, rooms, cursors, rows = row_ids(ids, torch.Generator())
    assert cursors.tolist() == [segments.FEW, 1]
    out, offsets = torch.full((16,), LEFT), torch.arange(ids.numel() + 1)
    cursors[1] = 0  # no pieces
    row_gradients.slot_row_sums(
        torch.ones(ids.numel(), 8), None, [8], torch.tensor([[8, 0, 0]]), ids, offsets, None,
        ranks, rooms, cursors, ids.numel(), ids.numel(), rows, 1.0, out,
    )  # fmt: skip
    assert out.tolist() == [0.0] * 8 + [float(segments.FEW)] * 8


def test_what_no_id_asks_for_is_left_alone() -> None:
    out = torch.full((8,), LEFT)
    none = torch.empty(0, dtype=torch.int32)
    of_rows = (none, none.view(0, 2), torch.zeros(2, dtype=torch.int32), 2, 2, 0)
    row_gradients.slot_row_sums(
        torch.ones(2, 8), None, [8], torch.tensor([[8, 0, 0]]), none, torch.zeros(3).int(), None,
        *of_rows, 1.0, out,
    )  # fmt: skip
    assert (out == LEFT).all()
