"""Bags that owners pool: as the C++ operators have them, and as they are read by owners."""

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fusedrec_torchrec.core import native

pytest.importorskip("triton")
from fusedrec_torchrec.exchange.device_bags import _Cells
from tests.core.gpu.device import kernels_of

kernels = kernels_of("bags")

EXAMPLES = settings(max_examples=25, deadline=None)
NEEDS_NATIVE = pytest.mark.skipif(not native.available(), reason="needs a C++ compiler")
GUARD = -77
ROWS = 60
BEFORE = 2
Shard = tuple[int, int, int]


@dataclass
class Batch:
    """Bags of slots.

    Attributes:
        ranks, buckets: how many there are.
        tables: the table of each slot.
        shards: [slot][shard] bucket, owner and first row.
        bags: [slot][bag] ids.
        weights: of all ids; None if there are none.
        means: whether each slot is mean-pooled.
        side_by_side: whether cells are in the order (sample, slot, shard).
        id_dtype: of the ids.
    """

    ranks: int
    buckets: int
    tables: list[int]
    shards: list[list[Shard]]
    bags: list[list[list[int]]]
    weights: list[float] | None = None
    means: tuple[bool, ...] | None = None
    side_by_side: bool = False
    id_dtype: torch.dtype = torch.int64

    @property
    def strides(self) -> list[int]:
        return [len(of_slot) for of_slot in self.bags]

    @property
    def ids(self) -> torch.Tensor:
        flat = [i for of_slot in self.bags for bag in of_slot for i in bag]
        return torch.tensor(flat, dtype=self.id_dtype)

    @property
    def lengths(self) -> torch.Tensor:
        lengths = [len(bag) for of_slot in self.bags for bag in of_slot]
        return torch.tensor(lengths, dtype=torch.int32)

    @property
    def weights_N(self) -> torch.Tensor | None:
        return None if self.weights is None else torch.tensor(self.weights, dtype=torch.float32)

    @property
    def layout(self) -> Any:
        counts = [len(of_slot) for of_slot in self.shards]
        flat = [shard for of_slot in self.shards for shard in of_slot]

        def slots_of(bucket: int) -> slice:
            own = [s for s, shards in enumerate(self.shards) if shards[0][0] == bucket]
            return slice(own[0], own[-1] + 1) if own else slice(0, 0)

        return SimpleNamespace(
            world_size=self.ranks,
            buckets=list(range(self.buckets)),
            shards=counts,
            parts=[bucket * self.ranks + owner for bucket, owner, _ in flat],
            ends_S=torch.tensor(counts).cumsum(0),
            shards_3X=torch.tensor(flat).t().contiguous(),
            slots_of=slots_of,
        )


@dataclass
class Asked:
    """What the kernels make of a batch."""

    counts: torch.Tensor
    cells: list[torch.Tensor]
    divisor: list[torch.Tensor]
    words: torch.Tensor
    bad: bool


def ask(
    batch: Batch,
    starts: list[int],
    size: int,
    row_counts: torch.Tensor | None = None,
    lengths: torch.Tensor | None = None,
    refused: bool | None = None,
) -> Asked:
    layout = batch.layout
    found = _Cells.of(layout, batch.strides, batch.side_by_side)
    places = torch.tensor(found.places)
    ids, weights = batch.ids, batch.weights_N
    means = None if batch.means is None else torch.tensor(batch.means, dtype=torch.uint8)
    lengths = batch.lengths if lengths is None else lengths
    # Of a larger batch: ids of other slots come before and behind.
    before = torch.full((BEFORE,), -5, dtype=ids.dtype)
    ids = torch.cat([before, ids, before])
    if weights is not None:
        weights = torch.cat([before.float(), weights, before.float()])
    begins = (torch.cat([lengths.new_zeros(1), lengths]).cumsum(0) + BEFORE).int()
    verdict = None if refused is None else torch.tensor(refused)
    counts, cells, divisor, sums, bad = kernels.ask_bags(
        ids, begins, weights, places,
        sum(found.per_bucket), torch.tensor(batch.tables),
        torch.full((len(batch.tables),), ROWS), means,
        layout.ends_S, layout.shards_3X, batch.buckets, batch.ranks, verdict,
    )  # fmt: skip
    words = torch.full((size,), GUARD, dtype=torch.int32)
    kernels.pack_units(
        ids, weights, places, layout.ends_S, layout.shards_3X, begins, sums, counts,
        row_counts, starts, words, verdict,
    )  # fmt: skip
    per_bucket = found.per_bucket
    divisors = list(divisor.split(per_bucket)) if batch.means is not None else []
    return Asked(counts, list(cells.split(per_bucket)), divisors, words, bool(bad))


@st.composite
def batches(draw: st.DrawFn, some_twice: bool = False) -> Batch:
    """Few different ids and weights, so that bags are equal, or differ in little."""
    ranks, buckets = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    side_by_side, weighted = draw(st.booleans()), draw(st.booleans())
    stride = draw(st.integers(0, 5))
    tables: list[int] = []
    shards: list[list[Shard]] = []
    bags: list[list[list[int]]] = []
    for bucket in sorted(draw(st.lists(st.integers(0, buckets - 1), min_size=1, max_size=4))):
        if shards and shards[-1][0][0] == bucket and draw(st.booleans()):  # of the same table
            tables.append(tables[-1])
            shards.append(shards[-1])
        else:
            owner = st.integers(0, ranks - 1)
            owners = draw(st.lists(owner, min_size=1, max_size=ranks, unique=not some_twice))
            tables.append(len(tables))
            shards.append([(bucket, o, draw(st.integers(0, 100))) for o in owners])
        count = stride if side_by_side else draw(st.integers(0, 5))
        of_slot = st.lists(st.lists(st.integers(0, 2), max_size=4), min_size=count, max_size=count)
        bags.append(draw(of_slot))
    ids = sum(len(bag) for of_slot in bags for bag in of_slot)
    weight = st.sampled_from([0.5, 2.0, 0.0, -0.0])
    return Batch(
        ranks, buckets, tables, shards, bags,
        draw(st.lists(weight, min_size=ids, max_size=ids)) if weighted else None,
        draw(st.none() | st.tuples(*[st.booleans()] * len(tables))),
        side_by_side,
        draw(st.sampled_from([torch.int32, torch.int64])),
    )  # fmt: skip


def by_cpp(batch: Batch, starts: list[int], size: int) -> Asked:
    layout = batch.layout
    looks = torch.ones(len(batch.tables), dtype=torch.bool)
    number_B, lengths_G, ids_M, weights_M, counts_3S = torch.ops.fusedrec.distinct_bags(
        batch.ids, batch.lengths, batch.weights_N, batch.strides, torch.tensor(batch.tables),
        looks, 0.0,
    )  # fmt: skip
    bag_U, row_U, units_KW, ids_KW, unit_X, place_G = torch.ops.fusedrec.bag_units(
        lengths_G, counts_3S[0].contiguous(), layout.ends_S, layout.shards_3X, batch.buckets,
        batch.ranks,
    )  # fmt: skip
    words = torch.full((size,), GUARD, dtype=torch.int32)
    torch.ops.fusedrec.pack_bags(
        ids_M, lengths_G, weights_M, bag_U, row_U, units_KW, ids_KW, starts, words
    )
    cells, numbers = [], number_B.split(batch.strides)
    for bucket in range(batch.buckets):
        own = layout.slots_of(bucket)
        of_bucket = torch.cat([number_B[:0], *numbers[own]])
        cells.append(
            torch.ops.fusedrec.bag_cells(
                of_bucket, batch.strides[own], layout.shards[own], place_G, unit_X,
                int(units_KW[bucket].sum()), batch.side_by_side,
            )
        )  # fmt: skip
    return Asked(torch.cat([units_KW, ids_KW]), cells, [], words, False)


def room(batch: Batch) -> int:
    """Returns words that are enough for any owner."""
    shards = max(map(len, batch.shards))
    return shards * (sum(batch.strides) + 2 * batch.ids.numel()) + 3


def check(batch: Batch, asked: Asked, starts: list[int]) -> None:
    """Every cell shows a unit that has the ids and weights of its bag, each of them once."""
    layout, weights = batch.layout, batch.weights_N
    at = list(starts)
    units: list[list[Any]] = []
    for bucket in range(batch.buckets):
        units.append([])
        for rank in range(batch.ranks):
            count = int(asked.counts[bucket, rank])
            ids = int(asked.counts[batch.buckets + bucket, rank])
            lengths = asked.words[at[rank] : at[rank] + count].tolist()
            assert sum(lengths) == ids and all(length > 0 for length in lengths)
            rows = asked.words[at[rank] + count :][:ids].split(lengths)
            at[rank] += count + ids
            bits = [None] * count
            if weights is not None:
                bits = [w.tolist() for w in asked.words[at[rank] :][:ids].split(lengths)]
                at[rank] += ids
            units[-1] += [(rank, r.tolist(), w) for r, w in zip(rows, bits, strict=True)]
    first_id = 0
    wanted: list[dict[Any, Any]] = [{} for _ in range(batch.buckets)]
    for s, of_slot in enumerate(batch.bags):
        for b, bag in enumerate(of_slot):
            own = None
            if weights is not None:
                own = weights[first_id : first_id + len(bag)].view(torch.int32).tolist()
            first_id += len(bag)
            for x, (bucket, rank, row) in enumerate(batch.shards[s]):
                rows = [i + row for i in bag]
                key = (b, s, x) if batch.side_by_side else (s, b, x)
                length = max(len(bag), 1) if batch.means and batch.means[s] else 1
                kind = (batch.tables[s], x, tuple(bag), str(own))
                wanted[bucket][key] = ((rank, rows, own) if bag else None, length, kind)
    for bucket in range(batch.buckets):
        cells = [wanted[bucket][key] for key in sorted(wanted[bucket])]
        got = asked.cells[bucket].tolist()
        assert len(got) == len(cells)
        shown: dict[Any, int] = {}
        for number, (unit, _, kind) in zip(got, cells, strict=True):
            if unit is None:
                assert number == len(units[bucket])
            else:
                assert units[bucket][number] == unit
                assert shown.setdefault(kind, number) == number
        assert sorted(shown.values()) == list(range(len(units[bucket])))
        if batch.means is not None:
            assert asked.divisor[bucket].tolist() == [length for _, length, _ in cells]
    assert layout.ends_S[-1] == layout.shards_3X.size(1)


@NEEDS_NATIVE
@EXAMPLES
@given(batches())
def test_units_cells_and_words_are_those_of_the_cpp_operators(batch: Batch) -> None:
    each = room(batch)
    starts = [2 + r * each for r in range(batch.ranks)]
    size = batch.ranks * each + 3
    got, want = ask(batch, starts, size), by_cpp(batch, starts, size)
    assert not got.bad
    assert got.counts.tolist() == want.counts.tolist()
    assert [c.tolist() for c in got.cells] == [c.tolist() for c in want.cells]
    assert got.words.tolist() == want.words.tolist()
    check(batch, got, starts)


@EXAMPLES
@given(batches(some_twice=True), st.integers(0, 3))
def test_an_owner_may_have_two_shards_and_words_of_rows_come_first(batch: Batch, n: int) -> None:
    each = room(batch) + 2 * n
    starts = [r * each for r in range(batch.ranks)]
    rows = torch.full((2, batch.ranks + 1), n)
    got = ask(batch, starts, batch.ranks * each + 1, rows)
    check(batch, got, [start + 2 * n for start in starts])


LONG = list(range(40))
DIFFERENT = {
    "one id": [LONG, [*LONG[:-1], 7]],
    "first id": [LONG, [7, *LONG[1:]]],
    "order": [[1, 2], [2, 1]],
    "length": [[5, 5], [5, 5, 5], [5]],
    "nothing": [[], [0]],
}


@pytest.mark.parametrize("bags", DIFFERENT.values(), ids=DIFFERENT)
def test_bags_that_differ_in_little_are_told_apart(bags: list[list[int]]) -> None:
    batch = Batch(1, 1, [0], [[(0, 0, 0)]], [bags + bags])
    got = ask(batch, [0], 500)
    check(batch, got, [0])
    assert int(got.counts[0, 0]) == sum(map(bool, bags))


@pytest.mark.parametrize(
    ("weights", "units"),
    [
        ([1.0, 2.0, 1.0, 2.0], 1),
        ([1.0, 2.0, 1.0, 2.0000002], 2),
        ([1.0, 2.0, 2.0, 1.0], 2),
        ([0.0, 1.0, -0.0, 1.0], 2),
        ([float("nan"), 1.0, float("nan"), 1.0], 1),
    ],
)
def test_bags_are_equal_if_the_bits_of_their_weights_are(weights: list[float], units: int) -> None:
    batch = Batch(1, 1, [0], [[(0, 0, 3)]], [[[3, 3], [3, 3]]], weights)
    got = ask(batch, [0], 20)
    check(batch, got, [0])
    assert int(got.counts[0, 0]) == units


@pytest.mark.parametrize("hash_", [0, -1], ids=["first place", "last place"])
def test_bags_stay_apart_where_all_hashes_collide(
    hash_: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel that inserts is given hashes that are all the same.

    From the last place of the table a search goes on at the first one.
    """
    hash_bags = kernels._hash_bags

    class Same:
        def __getitem__(self, grid: Any) -> Any:
            def run(*args: Any, **constants: Any) -> None:
                hash_bags[grid](*args, **constants)
                args[6].fill_(hash_)  # the hashes

            return run

    monkeypatch.setattr(kernels, "_hash_bags", Same())
    bags = [[i // 3, i % 3] for i in range(9)] * 2
    batch = Batch(1, 1, [0, 1], [[(0, 0, 0)], [(0, 0, 60)]], [bags, bags], [0.5] * 72)
    got = ask(batch, [0], 200)
    check(batch, got, [0])
    assert int(got.counts[0, 0]) == 18


def test_more_bags_and_longer_ones_than_a_program_takes() -> None:
    bags = [[i % 50, *range(i % 7)] for i in range(700)]
    long = [list(range(40)) * 3] * 2 + [list(range(40)) * 2 + list(range(1, 41))]
    owners = [(0, 0, 5), (0, 1, 9)]
    batch = Batch(2, 1, [0, 1], [owners, owners[1:]], [bags, long])
    got = ask(batch, [0, 5000], 10000)
    check(batch, got, [0, 5000])


@pytest.mark.parametrize("bad_id", [-1, ROWS, 2**31, -(2**62)])
def test_an_id_out_of_range_is_told(bad_id: int) -> None:
    batch = Batch(1, 1, [0], [[(0, 0, 0)]], [[[1], [2, bad_id], [3]]])
    assert ask(batch, [0], 20).bad
    batch.bags[0][1][1] = 0
    assert not ask(batch, [0], 20).bad


def test_lengths_that_do_not_fit_and_words_without_room_overrun_nothing() -> None:
    batch = Batch(2, 1, [0, 0], [[(0, 1, 0)]] * 2, [[[1, 2], [3], []], [[5], [], [6]]])
    lengths = torch.tensor([9, -3, 2, 8, 8, -9], dtype=torch.int32)
    ask(batch, [0, 3], 6, lengths=lengths)
    ask(batch, [0, 3], 6)


def test_bags_have_no_ids_if_lengths_are_known_to_be_wrong() -> None:
    """Offsets 0, n, 0, n ... would have every other bag hash all ids, and compare them."""
    batch = Batch(2, 1, [0], [[(0, 1, 0)]], [[list(range(9)), *([] for _ in range(9))]])
    lengths = torch.tensor([9, -9] * 5, dtype=torch.int32)
    asked = ask(batch, [0, 30], 60, lengths=lengths)
    assert int(asked.counts.sum()) > 0
    asked = ask(batch, [0, 30], 60, lengths=lengths, refused=True)
    assert not asked.counts.any() and (asked.words == GUARD).all() and not asked.bad
    good = ask(batch, [0, 30], 60, refused=False)
    assert good.counts.equal(ask(batch, [0, 30], 60).counts) and int(good.counts.sum()) > 0
