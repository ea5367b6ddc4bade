"""Distinct rows by a hash table: unique keys, part by part, and the row of every id."""

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fusedrec_torchrec.core import native

pytest.importorskip("triton")
from fusedrec_torchrec.core.gpu import row_numbers

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

    def arguments(self, hot: torch.Tensor | None = None, in_order: bool = True) -> tuple[Any, ...]:
        lengths = self.lengths if in_order else self.lengths[:0]
        return (
            self.ids, lengths, self.counts, self.rows, self.starts, self.shifts,
            self.part_starts, hot, self.slot_ends, self.batch if in_order else 0,
        )  # fmt: skip


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


def check(batch: Batch, hot: dict[int, int] | None = None) -> None:
    """Every id finds its key again, unique keys are grouped by part, and each comes once."""
    table = None
    if hot is not None:
        pairs = torch.tensor(sorted(hot.items()), dtype=batch.part_starts.dtype).view(-1, 2)
        table = torch.ops.fusedrec.hot_table(pairs[:, 0].contiguous(), pairs[:, 1].contiguous())
    keys_U, rows_N, offsets, counts_P, bad = row_numbers.number_rows(
        *batch.arguments(table, in_order=False)
    )
    assert not offsets and not bool(bad) and bad.dtype == torch.bool and bad.dim() == 0
    wanted = keys_of(batch)
    if hot is not None:
        wanted = torch.tensor([hot.get(key, key) for key in wanted.tolist()], dtype=torch.int64)
    unique = keys_U[: int(counts_P.sum())].long()
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
def batches(draw: st.DrawFn) -> Batch:
    slots, samples = draw(st.integers(1, 5)), draw(st.integers(0, 5))
    rows = [draw(st.integers(1, 40)) for _ in range(slots)]
    bags = [
        [draw(st.lists(st.integers(0, n - 1), max_size=6)) for _ in range(samples)] for n in rows
    ]
    buckets = sorted({*draw(st.lists(st.integers(1, slots), max_size=2)), slots})
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


@pytest.mark.skipif(not native.available(), reason="needs a C++ compiler")
@EXAMPLES
@given(batches())
def test_bags_are_put_in_the_order_in_which_they_are_pooled(batch: Batch) -> None:
    """The result is that of the C++ operator, but for the order of rows within a part."""
    if not batch.batch:
        return
    want = torch.ops.fusedrec.number_rows(*batch.arguments())
    got = row_numbers.number_rows(*batch.arguments())
    assert got[3].tolist() == want[3].tolist()
    own, first, slot, at = want[3].view(len(batch.slot_ends), -1).sum(1).tolist(), 0, 0, 0
    for k, end in enumerate(batch.slot_ends):
        ids = sum(batch.counts[slot:end])
        mine = got[0][first : first + own[k]][got[1][at : at + ids].long()]
        theirs = want[0][first : first + own[k]][want[1][at : at + ids].long()]
        assert mine.equal(theirs)
        offsets = want[2][k]
        bags = (end - slot) * batch.batch
        assert got[2][k].tolist() == (offsets.tolist() if offsets.numel() else [*range(bags + 1)])
        first, slot, at = first + own[k], end, at + ids


def test_very_many_parts_and_ids_of_one_row() -> None:
    check(make([[[7] * 600]], [40], [1], 33))
    check(make([[list(range(700))]], [700], [1], 40))


def test_an_id_out_of_range_is_told_and_overruns_nothing() -> None:
    for bad_id in (-1, 10, 2**31, -(2**62)):
        batch = make([[[1], [bad_id], [3]]], [10], [1], 2)
        _, rows_N, _, counts_P, bad = row_numbers.number_rows(*batch.arguments())
        assert bool(bad) and int(rows_N.max()) < int(counts_P.sum()) <= 3


def test_lengths_that_do_not_fit_overrun_nothing() -> None:
    batch = make([[[1, 2], [3], [4]], [[5], [], [6]]], [10, 10], [2], 2)
    batch.lengths = torch.tensor([9, -3, 2, 8, 8, -9], dtype=torch.int32)
    row_numbers.number_rows(*batch.arguments())


@pytest.mark.skipif(not native.available(), reason="needs a C++ compiler")
def test_keys_of_hot_rows_become_those_of_their_replicas() -> None:
    batch = make([[[1, 2, 3], [3, 9]], [[4], [1, 1]]], [10, 6], [2], 2)
    first = int(batch.part_starts[-1])
    batch.part_starts = torch.tensor([0, 8, first, first + 4], dtype=torch.int32)
    check(batch, {int(keys_of(batch)[0]): first, int(keys_of(batch)[2]): first + 3})
    check(batch, {})
