"""Distinct rows by a hash table: unique keys, part by part, and the row of every id."""

from collections import Counter
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fusedrec_torchrec.core import native
from fusedrec_torchrec.exchange.hashing import hash_ids, table_salt

pytest.importorskip("triton")
from fusedrec_torchrec.core.gpu.segments import FEW, PIECE, most_pieces
from tests.core.gpu.device import kernels_of

row_numbers = kernels_of("row_numbers")

EXAMPLES = settings(max_examples=25, deadline=None)


@dataclass
class Batch:
    """Ids of slots, whose tables lie one after another on every rank, bucket after bucket."""

    ids: torch.Tensor
    lengths: torch.Tensor
    counts: list[int]
    rows: torch.Tensor
    starts: torch.Tensor
    shifts: torch.Tensor
    part_starts: torch.Tensor
    slot_ends: list[int]
    batch: int

    def arguments(self, hot: torch.Tensor | None = None) -> tuple[Any, ...]:
        return (
            self.ids, self.lengths[:0], self.counts, self.rows, self.starts, self.shifts,
            self.part_starts, hot, self.slot_ends, 0,
        )  # fmt: skip

    def of_batch(self, hot: torch.Tensor | None = None) -> tuple[Any, ...]:
        """What ``number_batch_rows`` wants but ids and offsets."""
        return self.batch, self.rows, None, self.starts, self.shifts, self.part_starts, hot


def make(
    bags: list[list[list[int]]],
    table_rows: list[int],
    buckets: list[int],
    ranks: int,
    key_dtype: torch.dtype = torch.int32,
    id_dtype: torch.dtype = torch.int64,
    first_key: int = 0,
) -> Batch:
    """Makes a batch; ``first_key`` moves all keys up."""
    key, part_starts = first_key, []
    starts = [[0] * ranks for _ in table_rows]
    shifts = [[0] * ranks for _ in table_rows]
    first = 0
    for end in buckets:
        for r in range(ranks):
            part_starts.append(key)
            for t in range(first, end):
                block = -(-table_rows[t] // ranks)
                begin, stop = (min(n * block, table_rows[t]) for n in (r, r + 1))
                starts[t][r], shifts[t][r] = begin, key - begin
                key += stop - begin
        first = end
    flat = [i for slot in bags for bag in slot for i in bag]
    return Batch(
        torch.tensor(flat, dtype=id_dtype),
        torch.tensor([len(bag) for slot in bags for bag in slot], dtype=torch.int32),
        [sum(map(len, slot)) for slot in bags],
        torch.tensor(table_rows),
        torch.tensor(starts),
        torch.tensor(shifts),
        torch.tensor([*part_starts, key], dtype=key_dtype),
        buckets,
        len(bags[0]),
    )


def keys_of(batch: Batch) -> torch.Tensor:
    slot = torch.arange(len(batch.counts)).repeat_interleave(torch.tensor(batch.counts))
    ids = batch.ids.long()
    owner = (ids[:, None] >= batch.starts[slot]).sum(1) - 1
    # Empty ranges begin where the next one does.
    for i, (s, id_) in enumerate(zip(slot.tolist(), ids.tolist(), strict=True)):
        owner[i] = max(r for r in range(batch.starts.size(1)) if batch.starts[s, r] <= id_)
    return ids + batch.shifts[slot, owner]


def hot_table(batch: Batch, hot: dict[int, int]) -> torch.Tensor:
    """The hash table that finds the keys of replicas."""
    pairs = torch.tensor(sorted(hot.items()), dtype=batch.part_starts.dtype).view(-1, 2)
    table: torch.Tensor = torch.ops.fusedrec.hot_table(*(x.contiguous() for x in pairs.unbind(1)))
    return table


def check(batch: Batch, hot: dict[int, int] | None = None) -> None:
    """Every id finds its key again, unique keys are grouped by part, and each comes once."""
    table = None if hot is None else hot_table(batch, hot)
    keys_U, rows_N, offsets, counts_P, bad = row_numbers.number_rows(*batch.arguments(table))
    assert not offsets and not bool(bad) and bad.dtype == torch.bool and bad.dim() == 0
    wanted = keys_of(batch)
    if hot is not None:
        wanted = torch.tensor([hot.get(key, key) for key in wanted.tolist()], dtype=torch.int64)
    unique, padding = keys_U[: int(counts_P.sum())].long(), keys_U[int(counts_P.sum()) :]
    if hot is not None:  # whoever counts keys knows padding by it
        assert (padding == batch.part_starts[-1]).all()
    assert sorted(unique.tolist()) == sorted(set(wanted.tolist()))
    places = torch.searchsorted(batch.part_starts.long(), unique, right=True) - 1
    assert places.tolist() == sorted(places.tolist())
    assert torch.bincount(places, minlength=counts_P.numel()).tolist() == counts_P.tolist()
    owners = counts_P.numel() // len(batch.slot_ends)
    first, at, slot = 0, 0, 0
    for k, end in enumerate(batch.slot_ends):
        ids = sum(batch.counts[slot:end])
        assert (unique[first:][rows_N[at : at + ids].long()] == wanted[at : at + ids]).all()
        first += int(counts_P[k * owners : (k + 1) * owners].sum())
        at, slot = at + ids, end


@st.composite
def batches(draw: st.DrawFn, one_bucket: bool = False) -> Batch:
    slots, samples = draw(st.integers(1, 5)), draw(st.integers(0, 5))
    rows = [draw(st.integers(1, 40)) for _ in range(slots)]
    bags = [
        [draw(st.lists(st.integers(0, n - 1), max_size=6)) for _ in range(samples)] for n in rows
    ]
    buckets = sorted({*draw(st.lists(st.integers(1, slots), max_size=2)), slots})
    buckets = [slots] if one_bucket else buckets
    wide = draw(st.booleans())
    return make(
        bags, rows, buckets, draw(st.integers(1, 4)),
        torch.int64 if wide else torch.int32,
        draw(st.sampled_from([torch.int32, torch.int64])),
        draw(st.sampled_from([0, 2**40])) if wide else draw(st.sampled_from([0, 2**31 - 400])),
    )  # fmt: skip


@EXAMPLES
@given(batches())
def test_ids_find_their_keys(batch: Batch) -> None:
    check(batch)


@EXAMPLES
@given(batches(), st.data())
def test_offsets_of_bags_tell_which_slot_an_id_is_of(batch: Batch, data: st.DataObject) -> None:
    """Rows count over all buckets; ids of other slots, behind the last one, are left alone."""
    if not batch.batch:
        return
    others = data.draw(st.lists(st.integers(0, 99), max_size=4))
    offset_dtype = data.draw(st.sampled_from([torch.int32, torch.int64]))
    ids_N = torch.cat([batch.ids, torch.tensor(others, dtype=batch.ids.dtype)])
    offsets = torch.tensor([0, *batch.lengths.tolist(), *others]).cumsum(0)
    keys_U, rows_N, counts_P, bad, *row_ids = row_numbers.number_batch_rows(
        ids_N, offsets.to(offset_dtype), *batch.of_batch()
    )
    assert not bool(bad) and keys_U.numel() == rows_N.numel() == ids_N.numel()
    unique, wanted = keys_U[: int(counts_P.sum())].long(), keys_of(batch)
    assert sorted(unique.tolist()) == sorted(set(wanted.tolist()))
    assert (unique[rows_N[: batch.ids.numel()].long()] == wanted).all()
    places = torch.searchsorted(batch.part_starts.long(), unique, right=True) - 1
    assert places.tolist() == sorted(places.tolist())
    assert torch.bincount(places, minlength=counts_P.numel()).tolist() == counts_P.tolist()
    check_ids_of_rows(rows_N[: batch.ids.numel()], unique.numel(), *row_ids)


def check_ids_of_rows(
    rows_N: torch.Tensor,
    rows: int,
    ranks_N: torch.Tensor,
    segments_U2: torch.Tensor,
    cursors: torch.Tensor,
) -> None:
    """Ids of a row are numbered; rows have room for them, of their own, those of many in pieces."""
    ids, (few, pieces) = ranks_N.numel(), cursors.tolist()
    starts, counts = segments_U2[:rows].unbind(1)
    assert counts.tolist() == torch.bincount(rows_N, minlength=rows).tolist()
    for row, count in enumerate(counts.tolist()):
        assert sorted(ranks_N[: rows_N.numel()][rows_N == row].tolist()) == list(range(count))
    is_long = counts > FEW
    assert few == int(counts[~is_long].sum()) <= ids
    assert pieces <= most_pieces(ids)
    rooms = torch.where(is_long, -(-counts // PIECE) * PIECE, counts)
    order = starts.argsort()
    ends = (starts + rooms)[order]
    assert (ends[:-1] <= starts[order][1:]).all()
    assert (starts[is_long] >= ids).all() and ((starts + counts)[~is_long] <= few).all()
    assert ((starts[is_long] - ids) % PIECE == 0).all()
    if bool(is_long.any()):
        assert int(ends[-1]) == ids + pieces * PIECE


@pytest.mark.parametrize("rows", [1, 3, 40, 5000])
@pytest.mark.parametrize("parts", [1, 5, 33])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_ids_of_rows_with_few_and_with_many(rows: int, parts: int, dtype: torch.dtype) -> None:
    """Up to one row that every id asks for, and a table of distinct rows that fills up."""
    largest = torch.iinfo(dtype).max - 1 - rows
    drawn = torch.randint(rows, (1000,), generator=torch.Generator().manual_seed(rows))
    batch = make([[drawn.tolist()[:600], drawn.tolist()[600:]]], [rows], [1], parts, dtype,
                 first_key=largest)  # fmt: skip
    keys_U, rows_N, counts_P, bad, *row_ids = row_numbers.number_batch_rows(
        batch.ids, torch.tensor([0, 600, 1000]), *batch.of_batch()
    )
    assert not bool(bad) and (keys_U[rows_N.long()] == keys_of(batch)).all()
    assert int(counts_P.sum()) == len(set(drawn.tolist()))
    check_ids_of_rows(rows_N, int(counts_P.sum()), *row_ids)


def test_no_slots_and_no_bags_ask_for_no_rows() -> None:
    batch = make([[[], []]], [10], [1], 2)
    ids, offsets = torch.tensor([4, 5, 6]), torch.tensor([0])
    arguments = (0, *batch.of_batch()[1:])
    _, rows_N, counts_P, bad, *_ = row_numbers.number_batch_rows(ids, offsets, *arguments)
    assert rows_N.tolist() == [0, 0, 0] and counts_P.tolist() == [0, 0] and not bool(bad)


def test_raw_ids_are_hashed() -> None:
    raw = [0, 1, -1, 2**63 - 1, -(2**63), 123456789]
    batch = make([[[i] for i in raw], [[0], [1], [2], [3], [4], [5]]], [10, 6], [2], 2)
    salts = torch.tensor([[1, table_salt("a")], [0, 0]])
    offsets = torch.arange(13)
    arguments = list(batch.of_batch())
    arguments[2] = salts
    keys_U, rows_N, _, bad, *_ = row_numbers.number_batch_rows(batch.ids, offsets, *arguments)
    assert not bool(bad)
    hashed = hash_ids(batch.ids[:6], salts[0, 1], torch.tensor(10))
    batch.ids = torch.cat([hashed, batch.ids[6:]])
    assert keys_U[rows_N.long()].tolist() == keys_of(batch).tolist()
    huge = 2**62 + 12345
    want = hash_ids(torch.tensor(raw), salts[0, 1], torch.tensor(huge))
    one = make([[[0] for _ in raw]], [huge], [1], 1, torch.int64)
    one.ids = torch.tensor(raw)
    arguments = list(one.of_batch())
    arguments[2] = salts[:1]
    keys_U, rows_N, _, bad, *_ = row_numbers.number_batch_rows(one.ids, offsets[:7], *arguments)
    assert not bool(bad) and keys_U[rows_N.long()].tolist() == want.tolist()


def test_very_many_parts_and_ids_of_one_row() -> None:
    check(make([[[7] * 600]], [40], [1], 33))
    check(make([[list(range(700))]], [700], [1], 40))


def test_ids_of_one_row_read_its_place_and_do_not_fight_for_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    interpreter = pytest.importorskip("triton.runtime.interpreter")
    builder, exchanged = interpreter.InterpreterBuilder, Counter[int]()
    exchange = builder.create_atomic_cas

    def count(self: Any, ptr: Any, *others: Any) -> Any:
        exchanged.update(ptr.data.flatten().tolist())
        return exchange(self, ptr, *others)

    monkeypatch.setattr(builder, "create_atomic_cas", count)
    ids = 20 * row_numbers.INSERTED
    rows = [7] * ids
    rows[:: row_numbers.INSERTED] = range(20)  # a new row in every program
    batch = make([[rows]], [40], [1], 2)
    keys_U, rows_N, *_ = row_numbers.number_batch_rows(
        batch.ids, torch.tensor([0, ids]), *batch.of_batch()
    )
    assert (keys_U[rows_N.long()] == keys_of(batch)).all()
    # Once by every id of the program that has it first, and by ids whose own place it is.
    assert exchanged and max(exchanged.values()) <= 2 * row_numbers.INSERTED


def test_an_id_out_of_range_is_told_and_overruns_nothing() -> None:
    for bad_id in (-1, 10, 2**31, -(2**62)):
        batch = make([[[1], [bad_id], [3]]], [10], [1], 2)
        _, rows_N, counts_P, bad, *_ = row_numbers.number_batch_rows(
            batch.ids, torch.arange(4), *batch.of_batch()
        )
        assert bool(bad) and int(rows_N.max()) < int(counts_P.sum()) <= 3


def test_lengths_that_do_not_fit_overrun_nothing() -> None:
    batch = make([[[1, 2], [3], [4]], [[5], [], [6]]], [10, 10], [2], 2)
    for offsets in ([0, 9, 6, 8, 16, 24, 15], [0, 0, 0, 0, 0, 0, 0], [-5, -4, -3, -2, -1, 0, 1]):
        _, rows_N, counts_P, *_ = row_numbers.number_batch_rows(
            batch.ids, torch.tensor(offsets), *batch.of_batch()
        )
        assert int(rows_N.min()) >= 0 and int(rows_N.max()) <= max(int(counts_P.sum()) - 1, 0)


@pytest.mark.skipif(not native.available(), reason="needs a C++ compiler")
def test_keys_of_hot_rows_become_those_of_their_replicas() -> None:
    batch = make([[[1, 2, 3], [3, 9]], [[4], [1, 1]]], [10, 6], [2], 2)
    first = int(batch.part_starts[-1])
    batch.part_starts = torch.tensor([0, 8, first, first + 4], dtype=torch.int32)
    check(batch, {int(keys_of(batch)[0]): first, int(keys_of(batch)[2]): first + 3})
    check(batch, {})


@pytest.mark.skipif(not native.available(), reason="needs a C++ compiler")
@EXAMPLES
@given(batches(one_bucket=True), st.data())
def test_hot_rows_of_a_batch_are_asked_of_their_replicas(batch: Batch, data: st.DataObject) -> None:
    """What is behind the unique keys is the size of the key space, for whoever counts keys."""
    if not batch.batch:
        return
    wanted, first = keys_of(batch), int(batch.part_starts[-1])
    chosen = data.draw(st.sets(st.sampled_from([*wanted.tolist(), int(batch.part_starts[0])])))
    hot = {key: first + place for place, key in enumerate(sorted(chosen))}
    size = torch.tensor([first + len(hot)], dtype=batch.part_starts.dtype)
    batch.part_starts = torch.cat([batch.part_starts, size])
    wanted = torch.tensor([hot.get(key, key) for key in wanted.tolist()], dtype=torch.int64)
    others = torch.tensor([5, 6], dtype=batch.ids.dtype)  # of other slots
    keys_U, rows_N, counts_P, bad, *row_ids = row_numbers.number_batch_rows(
        torch.cat([batch.ids, others]),
        torch.tensor([0, *batch.lengths.tolist(), 2]).cumsum(0).int(),
        *batch.of_batch(hot_table(batch, hot)),
    )
    unique, padding = keys_U[: int(counts_P.sum())].long(), keys_U[int(counts_P.sum()) :]
    assert not bool(bad) and padding.tolist() == size.tolist() * padding.numel()
    assert padding.numel() >= 2
    assert sorted(unique.tolist()) == sorted(set(wanted.tolist()))
    assert int(counts_P[-1]) == len(set(wanted.tolist()) & set(hot.values()))
    assert (unique[rows_N[: batch.ids.numel()].long()] == wanted).all()
    check_ids_of_rows(rows_N[: batch.ids.numel()], unique.numel(), *row_ids)


@pytest.mark.parametrize("places", [1, 3, 64, 300])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_full_tables_and_their_ends(
    places: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A table with a place for each distinct row: searches go on from its end to its beginning."""
    monkeypatch.setattr(row_numbers, "places_for", lambda _: places)
    drawn = torch.randperm(3 * places, generator=torch.Generator().manual_seed(places)) % places
    batch = make([[drawn.tolist()]], [places], [1], 3, dtype)
    check(batch)
    keys_U, rows_N, counts_P, bad, *row_ids = row_numbers.number_batch_rows(
        batch.ids, torch.tensor([0, 3 * places]), *batch.of_batch()
    )
    assert not bool(bad) and int(counts_P.sum()) == places
    assert (keys_U[rows_N.long()] == keys_of(batch)).all()
    check_ids_of_rows(rows_N, places, *row_ids)
