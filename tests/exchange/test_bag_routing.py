"""What is asked of owners that pool: in C++, by torch's own operators, and written out."""

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fusedrec_torchrec.core import native
from fusedrec_torchrec.exchange.bag_routing import BagRoute
from fusedrec_torchrec.exchange.distinct_bags import DistinctBags

CPU = torch.device("cpu")
WAYS = [
    "torch",
    pytest.param(
        "native", marks=pytest.mark.skipif(not native.available(), reason="needs a C++ compiler")
    ),
]
GUARD = -77


@dataclass
class Batch:
    """Distinct bags of slots.

    Attributes:
        ranks, buckets: how many there are.
        slots: [slot][shard] bucket, owner and first row.
        bucket_of: the bucket of each slot.
        bags: [slot][distinct bag] rows; each is followed by weights of the same length.
        numbers: [slot][bag] number of the distinct bag; -1 if it is empty.
    """

    ranks: int
    buckets: int
    slots: list[list[tuple[int, int, int]]]
    bucket_of: list[int]
    bags: list[list[list[int]]]
    weights: list[float] | None
    numbers: list[list[int]]


@st.composite
def batches(draw: st.DrawFn) -> Batch:
    ranks, buckets = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    slots, bucket_of, bags, numbers, first = [], [], [], [], 0
    stride = draw(st.integers(0, 4))
    for bucket in sorted(draw(st.lists(st.integers(0, buckets - 1), min_size=1, max_size=4))):
        owners = draw(st.lists(st.integers(0, ranks - 1), min_size=1, max_size=ranks, unique=True))
        slots.append([(bucket, owner, draw(st.integers(0, 100))) for owner in owners])
        bucket_of.append(bucket)
        rows = st.lists(st.integers(0, 50), min_size=1, max_size=3)
        bags.append(draw(st.lists(rows, max_size=4)))
        choices = [-1, *range(first, first + len(bags[-1]))]
        numbers.append([draw(st.sampled_from(choices)) for _ in range(stride)])
        first += len(bags[-1])
    total = sum(len(bag) for of_slot in bags for bag in of_slot)
    weights = [i / 2 for i in range(total)] if draw(st.booleans()) else None
    return Batch(ranks, buckets, slots, bucket_of, bags, weights, numbers)


def route_of(batch: Batch, way: str) -> BagRoute:
    shards = [shard for of_slot in batch.slots for shard in of_slot]
    counts = [len(of_slot) for of_slot in batch.slots]

    def slots_of(bucket: int) -> slice:
        own = [s for s, b in enumerate(batch.bucket_of) if b == bucket]
        return slice(own[0], own[-1] + 1) if own else slice(0, 0)

    layout: Any = SimpleNamespace(
        device=CPU,
        world_size=batch.ranks,
        buckets=list(range(batch.buckets)),
        shards=counts,
        ends_S=torch.tensor(counts).cumsum(0),
        shards_3X=torch.tensor(shards).t().contiguous(),
        slots_of=slots_of,
    )
    flat = [bag for of_slot in batch.bags for bag in of_slot]
    rows = torch.tensor([row for bag in flat for row in bag], dtype=torch.int32)
    distinct = DistinctBags(
        torch.tensor([n for of_slot in batch.numbers for n in of_slot], dtype=torch.int32),
        torch.tensor([len(bag) for bag in flat], dtype=torch.int32),
        rows,
        None if batch.weights is None else torch.tensor(batch.weights),
        [len(of_slot) for of_slot in batch.bags],
        [sum(map(len, of_slot)) for of_slot in batch.bags],
        full=len(flat),
    )
    with pytest.MonkeyPatch.context() as patch:
        if way == "torch":
            patch.setattr(native, "available", lambda: False)
        return BagRoute(layout, distinct, rows)


def units_of(batch: Batch) -> dict[tuple[int, int], list[tuple[int, int, int]]]:
    """Returns distinct bag, shard and first row of each unit in order, by bucket and owner."""
    units: dict[tuple[int, int], list[tuple[int, int, int]]] = {
        (k, r): [] for k in range(batch.buckets) for r in range(batch.ranks)
    }
    g = 0
    for shards, bags in zip(batch.slots, batch.bags, strict=True):
        for _ in bags:
            for x, (bucket, owner, first_row) in enumerate(shards):
                units[bucket, owner].append((g, x, first_row))
            g += 1
    return units


@pytest.mark.parametrize("way", WAYS)
@given(batch=batches())
def test_words_of_owners_are_lengths_rows_and_weights(way: str, batch: Batch) -> None:
    route, units = route_of(batch, way), units_of(batch)
    flat = [bag for of_slot in batch.bags for bag in of_slot]
    starts = [sum(map(len, flat[:g])) for g in range(len(flat))]
    messages: list[list[int]] = []
    for rank in range(batch.ranks):
        words: list[int] = []
        for bucket in range(batch.buckets):
            own = units[bucket, rank]
            assert int(route.units_KW[bucket, rank]) == len(own)
            assert int(route.ids_KW[bucket, rank]) == sum(len(flat[g]) for g, _, _ in own)
            before = len(words)
            words += [len(flat[g]) for g, _, _ in own]
            words += [row + first for g, _, first in own for row in flat[g]]
            if batch.weights is not None:
                floats = [
                    weight
                    for g, _, _ in own
                    for weight in batch.weights[starts[g] : starts[g] + len(flat[g])]
                ]
                words += torch.tensor(floats).view(torch.int32).tolist()
            units_HW = route.counts_HW[[bucket, batch.buckets + bucket], rank].tolist()
            assert units_HW[0] + route.words_per_id * units_HW[1] == len(words) - before
        messages.append(words)
    # With gaps between the messages, which stay as they are.
    want: list[int] = []
    begins = []
    for words in messages:
        want += [GUARD] * 3
        begins.append(len(want))
        want += words
    got = torch.full((len(want) + 1,), GUARD, dtype=torch.int32)
    route.write(got, begins)
    assert got.tolist() == [*want, GUARD]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("side_by_side", [True, False])
@given(batch=batches())
def test_cells_show_the_units_of_their_bags(way: str, side_by_side: bool, batch: Batch) -> None:
    route, units = route_of(batch, way), units_of(batch)
    strides = [len(of_slot) for of_slot in batch.numbers]
    for bucket in range(batch.buckets):
        own = [s for s, b in enumerate(batch.bucket_of) if b == bucket]
        if not own:
            continue  # every bucket has a table
        order = [unit[:2] for rank in range(batch.ranks) for unit in units[bucket, rank]]
        cells = {
            (s, b, x): len(order) if number < 0 else order.index((number, x))
            for s in own
            for b, number in enumerate(batch.numbers[s])
            for x in range(len(batch.slots[s]))
        }
        keys = sorted(cells, key=lambda c: (c[1], c[0], c[2]) if side_by_side else c)
        got = route.cells(bucket, strides, side_by_side)
        assert got.dtype == torch.int32
        assert got.tolist() == [cells[key] for key in keys]
