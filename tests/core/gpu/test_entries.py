"""Entries that reach a threshold: those of the torch path, in the same bytes."""

from collections import Counter
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("triton")
from fusedrec_torchrec.codecs.codec import Entries
from fusedrec_torchrec.codecs.dct import DctCodec, relative_to_largest
from fusedrec_torchrec.codecs.numbers import NumberCodec
from fusedrec_torchrec.core import native
from tests.core.gpu.device import kernels_of

entries = kernels_of("entries")


def check(
    rows: torch.Tensor, tau: float, counts: list[int], density: float, relative: bool
) -> None:
    dim = rows.size(1)
    codec = DctCodec(dim, density, 10, NumberCodec.of("fp32", 1), relative)
    rooms, threshold = [codec.room(n) for n in counts], torch.tensor(tau)
    scores = relative_to_largest(rows) if relative else rows
    with mock.patch.object(native, "available_on", return_value=False):
        streams, sent, used = codec.encode_entries(rows, scores, threshold, counts)
    got = entries.encode_entries(rows, threshold, counts, rooms, relative, codec.index_bytes)
    positions, values, where, columns, totals = got
    reach = ~(scores.abs() < threshold)
    want_totals = [int(part.sum()) for part in reach.split(counts)]
    assert totals.tolist() == want_totals
    fits = all(total <= room for total, room in zip(want_totals, rooms, strict=True))
    assert fits == (used <= 1)
    if fits:
        assert positions.equal(sent.positions_E)
        assert values.view(torch.uint8).equal(streams[0])
        assert where.equal(streams[1])
        assert columns.equal(streams[2] if codec.index_bytes else streams[1][:0])
    else:
        check_largest(scores, positions, rooms, counts, want_totals)
        assert values.view(torch.int32).equal(Entries(positions).take(rows).view(torch.int32))
    out, want = torch.full_like(rows, 7.0), torch.full_like(rows, 7.0)
    back = entries.decode_entries(values, where, columns, counts, rooms, codec.index_bytes, out)
    assert back.equal(positions)
    Entries(positions).put(values, want)
    torch.testing.assert_close(out, want, rtol=0, atol=0, equal_nan=True)


def check_largest(
    scores: torch.Tensor,
    positions: torch.Tensor,
    rooms: list[int],
    counts: list[int],
    totals: list[int],
) -> None:
    """All room of a rank is used, by its largest entries, each once and in order."""
    flat, begin = scores.abs().nan_to_num(nan=torch.inf).view(-1), 0
    for own, room, count, total in zip(positions.split(rooms), rooms, counts, totals, strict=True):
        end = begin + count * scores.size(1)
        used = own[: min(total, room)].tolist()
        assert used == sorted(set(used)) and all(begin <= at < end for at in used)
        assert (own[len(used) :] == flat.numel()).all()
        kept = torch.zeros(end - begin, dtype=torch.bool)
        kept[own[: len(used)] - begin] = True
        mine = flat[begin:end]
        if kept.any() and not kept.all():
            assert mine[kept].min() >= mine[~kept].max()
        begin = end


@settings(max_examples=80, deadline=None)
@given(
    counts=st.lists(st.integers(0, 20), min_size=1, max_size=3),
    dim=st.sampled_from([4, 12, 64, 260]),
    density=st.sampled_from([0.02, 0.25, 0.9]),
    tau=st.sampled_from([0.0, 0.3, 0.97, 1.5, float("nan"), float("inf")]),
    relative=st.booleans(),
    bad=st.sampled_from([None, None, float("nan"), float("inf"), 0.0]),
    seed=st.integers(0, 999),
)
def test_entries_are_those_of_the_torch_path(
    counts: list[int],
    dim: int,
    density: float,
    tau: float,
    relative: bool,
    bad: float | None,
    seed: int,
) -> None:
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randn(sum(counts), dim, generator=generator)
    if bad is not None and len(rows):
        rows[seed % len(rows)] = bad
    check(rows, tau, counts, density, relative)


def test_of_equal_entries_the_first_travel() -> None:
    rows = torch.ones(9, 16)
    rooms = [5, 40]
    positions, *_ = entries.encode_entries(rows, torch.tensor(0.5), [2, 7], rooms, False, 1)
    assert positions.tolist() == [*range(5), *range(32, 72)]


def test_rows_are_read_a_few_times_if_there_is_not_enough_room(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Whatever the scores are: to count them, to find the limit, to arrange and to write."""
    interpreter = pytest.importorskip("triton.runtime.interpreter")
    builder, rows = interpreter.InterpreterBuilder, torch.randn(300, 16)
    load, first, loaded = builder.create_masked_load, rows.data_ptr(), Counter[int]()

    def count(self: Any, ptrs: Any, mask: Any, *others: Any) -> Any:
        loaded.update(ptrs.data[mask.data & (ptrs.data >= first)].flatten().tolist())
        return load(self, ptrs, mask, *others)

    monkeypatch.setattr(builder, "create_masked_load", count)
    *_, totals = entries.encode_entries(rows, torch.tensor(0.0), [300], [77], False, 1)
    assert totals.tolist() == [4800]
    assert max(loaded[first + 4 * i] for i in range(4800)) <= 7


def test_more_rows_than_a_program_has() -> None:
    rows = torch.randn(2500, 16, generator=torch.Generator().manual_seed(0))
    for tau in (0.1, 1.4):
        check(rows, tau, [1300, 0, 1200], 0.25, True)


@settings(max_examples=30, deadline=None)
@given(st.lists(st.integers(0, 12), max_size=9, unique=True), st.integers(0, 3))
def test_numbers_are_taken_and_put(at: list[int], rows: int) -> None:
    positions = torch.tensor([min(n, rows * 4) for n in at], dtype=torch.int64)
    matrix = torch.randn(rows, 4)
    taken = entries.take_entries(matrix, positions)
    assert taken.equal(Entries(positions).take(matrix))
    got, want = torch.ones(rows, 4), torch.ones(rows, 4)
    entries.put_entries(taken, positions, got)
    Entries(positions).put(taken, want)
    assert got.equal(want)
