"""Equal bags are found, all others are told apart: in C++ and by torch's own operators."""

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fusedrec_torchrec.core import native
from fusedrec_torchrec.exchange import distinct_bags
from fusedrec_torchrec.exchange.distinct_bags import BagDedup, DistinctBags

CPU = torch.device("cpu")
NEEDS_NATIVE = pytest.mark.skipif(not native.available(), reason="needs a C++ compiler")
WAYS = ["by sort", pytest.param("native", marks=NEEDS_NATIVE)]
Bag = tuple[tuple[int, ...], tuple[float, ...] | None]
# [slot][bag] ids and weights.
Slots = Sequence[Sequence[Bag]]


def bags_of(*ids: Sequence[int]) -> list[Bag]:
    return [(tuple(each), None) for each in ids]


def dedup_of(way: str, tables: Sequence[int], worth: float = 0.0) -> BagDedup:
    with pytest.MonkeyPatch.context() as patch:
        if way == "by sort":
            patch.setattr(native, "available", lambda: False)
        return BagDedup(tables, worth, CPU)


def find(
    dedup: BagDedup, slots: Slots, looks: Sequence[bool] | None = None, **types: torch.dtype
) -> DistinctBags:
    bags = [bag for slot in slots for bag in slot]
    weighted = any(weights is not None for _, weights in bags)
    return dedup(
        torch.tensor([i for ids, _ in bags for i in ids], dtype=types.get("ids", torch.int64)),
        torch.tensor([len(ids) for ids, _ in bags], dtype=types.get("lengths", torch.int32)),
        torch.tensor([w for _, weights in bags for w in weights or ()]) if weighted else None,
        [len(slot) for slot in slots],
        [True] * len(slots) if looks is None else looks,
    )


def oracle(tables: Sequence[int], slots: Slots, looks: Sequence[bool]) -> dict[str, Any]:
    """The same with a dictionary."""
    seen: dict[object, int] = {}
    distinct: list[Bag] = []
    numbers, bags_S, ids_S = [], [0] * len(slots), [0] * len(slots)
    for s, slot in enumerate(slots):
        for b, bag in enumerate(slot):
            if not bag[0]:
                numbers.append(-1)
                continue
            key = (tables[s], bag) if looks[s] else (s, b)
            if key not in seen:
                seen[key] = len(distinct)
                distinct.append(bag)
                bags_S[s] += 1
                ids_S[s] += len(bag[0])
            numbers.append(seen[key])
    return {"numbers": numbers, "distinct": distinct, "bags_S": bags_S, "ids_S": ids_S}


def check(got: DistinctBags, want: dict[str, Any]) -> None:
    assert got.number_B.dtype == got.lengths_G.dtype == torch.int32
    assert got.number_B.tolist() == want["numbers"]
    assert got.lengths_G.tolist() == [len(ids) for ids, _ in want["distinct"]]
    assert got.ids_M.tolist() == [i for ids, _ in want["distinct"] for i in ids]
    if got.weights_M is not None:
        assert got.weights_M.tolist() == [w for _, weights in want["distinct"] for w in weights]
    assert (got.bags_S, got.ids_S) == (want["bags_S"], want["ids_S"])


@st.composite
def batches(draw: st.DrawFn) -> tuple[list[int], list[list[Bag]], list[bool]]:
    """Few different ids and weights, so that bags are equal, or differ in little."""
    weighted = draw(st.booleans())
    ids = st.lists(st.integers(-1, 2), max_size=4).map(tuple)
    slots, tables, looks = [], [], []
    for _ in range(draw(st.integers(1, 4))):
        tables.append(draw(st.integers(0, 1)))
        looks.append(draw(st.booleans()))
        slot: list[Bag] = []
        for each in draw(st.lists(ids, max_size=8)):
            weights = tuple(draw(st.sampled_from([0.5, 2.0])) for _ in each) if weighted else None
            slot.append((each, weights))
        slots.append(slot)
    return tables, slots, looks


@pytest.mark.parametrize("way", WAYS)
@given(
    batch=batches(),
    ids=st.sampled_from([torch.int32, torch.int64]),
    lengths=st.sampled_from([torch.int32, torch.int64]),
)
def test_distinct_bags_are_those_of_a_dictionary(
    way: str, batch: Any, ids: torch.dtype, lengths: torch.dtype
) -> None:
    tables, slots, looks = batch
    got = find(dedup_of(way, tables), slots, looks, ids=ids, lengths=lengths)
    check(got, oracle(tables, slots, looks))


LONG = tuple(range(40))
DIFFERENT = {
    "one id": bags_of(LONG, (*LONG[:-1], 7)),
    "first id": bags_of(LONG, (7, *LONG[1:])),
    "order": bags_of((1, 2), (2, 1)),
    "length": bags_of((5, 5), (5, 5, 5), (5,)),
    "upper half of an id": bags_of((1,), (1 + 2**32,)),
    "sign": bags_of((1,), (-1,)),
    "one weight": [((1, 2), (1.0, 2.0)), ((1, 2), (1.0, 2.0000002))],
    "order of weights": [((3, 3), (1.0, 2.0)), ((3, 3), (2.0, 1.0))],
    "sign of no weight": [((3,), (0.0,)), ((3,), (-0.0,))],
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("bags", DIFFERENT.values(), ids=DIFFERENT)
def test_bags_that_differ_in_little_are_told_apart(way: str, bags: list[Bag]) -> None:
    got = find(dedup_of(way, [0]), [bags + bags])
    assert got.number_B.tolist() == [*range(len(bags))] * 2


@pytest.mark.parametrize("way", WAYS)
def test_equal_bags_are_one_in_one_table_and_two_in_two(way: str) -> None:
    slots = [bags_of((1, 2), ()), bags_of((), (1, 2)), bags_of((1, 2), (1, 2))]
    assert find(dedup_of(way, [4, 4, 9]), slots).number_B.tolist() == [0, -1, -1, 0, 1, 1]


@pytest.mark.parametrize("way", WAYS)
def test_weights_that_are_not_numbers_are_equal_by_their_bits(way: str) -> None:
    slots = [[((1,), (float("nan"),)), ((1,), (float("nan"),)), ((1,), (float("inf"),))]]
    assert find(dedup_of(way, [0]), slots).number_B.tolist() == [0, 0, 1]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("slots", [[[]], [[], []], [bags_of((), ())], [[], bags_of(())]])
def test_there_may_be_no_bags_and_no_ids(way: str, slots: Slots) -> None:
    tables = [0] * len(slots)
    check(find(dedup_of(way, tables), slots), oracle(tables, slots, [True] * len(slots)))


@pytest.mark.parametrize("way", WAYS)
def test_many_bags_in_one_batch_after_few_and_few_after_many(way: str) -> None:
    """The table of the C++ operator grows in a batch, and is kept."""
    dedup = dedup_of(way, [0])
    for count in (3, 5000, 2, 700):
        ids = [(i % (count // 2 + 1), 7) for i in range(count)]
        slots = [bags_of(*ids)]
        check(find(dedup, slots), oracle([0], slots, [True]))


@given(batch=batches())
def test_bags_stay_apart_where_all_hashes_collide(batch: Any) -> None:
    tables, slots, looks = batch
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(distinct_bags, "_MIX", (0, 0, 0, 0))
        got = find(dedup_of("by sort", tables), slots, looks)
    # Some equal ones may be missed; what is taken for equal must be so.
    bags = [(tables[s], *bag) for s, slot in enumerate(slots) for bag in slot]
    distinct = dict[int, Any]()
    for bag, number in zip(bags, got.number_B.tolist(), strict=True):
        assert (number < 0) == (not bag[1])
        if number >= 0:
            assert distinct.setdefault(number, bag) == bag
    assert sorted(distinct) == list(range(len(distinct)))
    numbers = [ids for _, (_, ids, _) in sorted(distinct.items())]
    assert got.lengths_G.tolist() == [len(ids) for ids in numbers]
    assert got.ids_M.tolist() == [i for ids in numbers for i in ids]


FACTOR, STEP, MORE = 0x9E3779B97F4A7C15, 0xD1342543DE82EF95, 0x632BE59BD9B4E019  # of bags.h
SIZE = 2**64
# Times powers of STEP one after another they add up to a multiple of SIZE; found by LLL.
RELATION = (-4500, 1913, 4925, -1279, -2315)


def power(exponent: int) -> int:
    return FACTOR * pow(STEP, exponent, SIZE) % SIZE


def signed(number: int) -> int:
    return (number + SIZE // 2) % SIZE - SIZE // 2


def floats(*bits: int) -> tuple[float, ...]:
    """The numbers that have these bits, as far as they are from those of 1.0."""
    ones = torch.full((len(bits),), 0x3F800000, dtype=torch.int32)
    return tuple((ones + torch.tensor(bits, dtype=torch.int32)).view(torch.float32).tolist())


SAME_IDS = tuple(range(len(RELATION)))
COLLIDING = {
    "ids": bags_of((7, 8), (signed(7 + power(2)), signed(8 - power(1)))),
    "order": bags_of((5, 5 - 2**63), (5 - 2**63, 5)),
    "more ids": bags_of((7,), (7, signed(-pow(power(2), -1, SIZE) - MORE))),
    "weights": [
        (SAME_IDS, floats(*[0] * len(RELATION))),
        (SAME_IDS, floats(*RELATION)),
    ],
}


@NEEDS_NATIVE
@pytest.mark.parametrize("bags", COLLIDING.values(), ids=COLLIDING)
def test_bags_stay_apart_where_hashes_of_the_operator_collide(bags: list[Bag]) -> None:
    weighted = bags[0][1] is not None
    ids = torch.tensor([i for ids, _ in bags for i in ids])
    lengths = torch.tensor([len(ids) for ids, _ in bags])
    weights = torch.tensor([w for _, all_ in bags for w in all_ or ()]) if weighted else None
    dedup = dedup_of("native", [0], worth=1 / 4)
    # Whether slots repeat is told by hashes alone.  If this fails, the hash is another one: then
    # this test needs other bags.
    assert dedup.repeating(ids, lengths, weights, [2], [True]) == [True]
    for first, second in (bags, reversed(bags)):
        got = find(dedup, [[first, second, second, first]])
        assert got.number_B.tolist() == [0, 1, 1, 0]


@NEEDS_NATIVE
@pytest.mark.parametrize("tables", [(150399, 7878489), (1515135, 6006616)])
def test_equal_bags_of_two_tables_stay_apart_where_hashes_collide(tables: tuple[int, int]) -> None:
    """The same ids have other hashes in other tables, but these are equal where the operator looks.

    That is in 42 of 64 bits: where it begins to look, of 1024 places, and what it sees there.
    """
    hashes = np.array(tables, np.uint64) * np.uint64(FACTOR)
    hashes += np.uint64((1 + (7 + MORE) * power(1)) % SIZE)
    hashes ^= hashes >> np.uint64(32)
    hashes *= np.uint64(FACTOR)
    hashes ^= hashes >> np.uint64(29)
    places, seen = (hashes >> np.uint64(54)).tolist(), (hashes % np.uint64(2**32)).tolist()
    assert places[0] == places[1] and seen[0] == seen[1]
    found = find(dedup_of("native", tables), [bags_of((7,)), bags_of((7,))])
    assert found.number_B.tolist() == [0, 1]


@NEEDS_NATIVE
def test_small_ids_do_not_make_a_slot_look() -> None:
    """Their bags are different, and so are the hashes by which that is decided."""
    every = [*itertools.product(range(16), repeat=3)]
    slot = bags_of(*every)
    assert len(slot) == 4096
    ids = torch.tensor(every).flatten()
    lengths = torch.full((len(slot),), 3)
    dedup = dedup_of("native", [0], worth=1e-6)
    assert dedup.repeating(ids, lengths, None, [len(slot)], [True]) == [False]


def numbers(*runs: Sequence[int]) -> list[Bag]:
    return bags_of(*[(number, -number) for run in runs for number in run])


# 1024 bags each, and how many of them are distinct.
SOMEWHERE = {
    "after others": (numbers(range(128), [-1] * 896), 129),
    "before others": (numbers([-1] * 128, range(896)), 897),
    "among others": (numbers(range(500), [-1] * 100, range(500, 924)), 925),
    "next to each other": (numbers(*[[i, i] for i in range(512)]), 512),
    "by turns": (numbers(*[[i, i + 1, i, i + 1] for i in range(0, 512, 2)]), 512),
    "in sessions": (numbers(*[[i] * 16 for i in range(64)]), 64),
    "in halves": (numbers(range(512), range(512)), 512),
    "backwards": (numbers(range(512), range(511, -1, -1)), 512),
    "in short rounds": (numbers(*[range(10)] * 102, range(4)), 10),
    "in long rounds": (numbers(range(401), range(401), range(222)), 401),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(("slot", "distinct"), SOMEWHERE.values(), ids=SOMEWHERE)
def test_bags_that_repeat_are_found_wherever_they_are(
    way: str, slot: list[Bag], distinct: int
) -> None:
    assert len(slot) == 1024
    fresh = numbers(range(1024))
    got = find(dedup_of(way, [0, 1, 2], worth=1 / 16), [fresh, slot, fresh])
    assert got.bags_S == [1024, distinct, 1024]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("bags", [256, 600, 1024, 1536, 2048, 3001, 4096, 8192])
def test_equal_halves_of_a_batch_are_found(way: str, bags: int) -> None:
    slot = numbers(range(bags // 2), range(bags - bags // 2))
    assert find(dedup_of(way, [0], worth=1 / 4), [slot]).bags_S == [bags - bags // 2]


@pytest.mark.parametrize("way", WAYS)
def test_a_slot_whose_bags_hardly_repeat_does_not_look(way: str) -> None:
    """Its bags are distinct then, also if they are bags of another slot that does look."""
    fresh, repeated = numbers(range(511), [0]), numbers(range(256), range(256))
    for slots in ([repeated, fresh], [fresh, repeated]):
        got = find(dedup_of(way, [0, 0], worth=1 / 16), slots)
        assert got.bags_S == [256 if slot is repeated else 512 for slot in slots]
        assert got.full == 1024
    assert find(dedup_of(way, [0, 0], worth=0.0), [fresh, repeated]).bags_S == [511, 0]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(("bags", "sample"), [(64, 32), (512, 128), (2048, 128), (8192, 512)])
def test_as_many_bags_of_a_sample_must_repeat_as_tell_of_enough_repeats(
    way: str, bags: int, sample: int
) -> None:
    """A sixteenth of many bags has a 256th of the repeats by chance."""
    once, repeats = numbers(range(bags)), 8
    of_sample = distinct_bags._sampled(torch.tensor([bags]), torch.zeros(bags, dtype=torch.int64))
    places = of_sample[0].nonzero().flatten().tolist()
    assert len(places) == sample and places == sorted(set(places))
    slot = list(once)
    for place in places[-repeats:]:
        slot[place] = slot[places[0]]
    enough = repeats * bags / sample**2  # the share of bags that seems to repeat
    assert find(dedup_of(way, [0], worth=enough), [slot]).bags_S == [bags - repeats]
    assert find(dedup_of(way, [0], worth=enough * 1.01), [slot]).bags_S == [bags]
    # What is not in the sample tells nothing.
    others = [b for b in range(bags) if b not in places]
    slot = list(once)
    for place in others[1:]:
        slot[place] = slot[others[0]]
    assert find(dedup_of(way, [0], worth=1e-6), [slot]).bags_S == [bags]


@pytest.mark.parametrize("way", WAYS)
def test_a_sample_is_of_bags_with_ids(way: str) -> None:
    """Empty bags are equal, but there is nothing to save; and ids are those behind them."""
    empty: list[Bag] = bags_of(*[()] * 600)
    fresh = numbers(range(600))
    sparse = [bag for pair in zip(empty, fresh, strict=True) for bag in pair]
    got = find(dedup_of(way, [0, 1], worth=1e-6), [sparse, empty])
    assert got.bags_S == [600, 0] and got.full == 600
    again = [bag for pair in zip(empty, numbers([*range(300)] * 2), strict=True) for bag in pair]
    assert find(dedup_of(way, [0], worth=1 / 16), [again]).bags_S == [300]


@NEEDS_NATIVE
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_slots_that_repeat_are_told_by_a_sample(weighted: bool, dtype: torch.dtype) -> None:
    repeated, fresh = numbers(range(128), range(384)), numbers(range(512))
    few, empty = numbers(range(8), range(4)), bags_of(*[()] * 40)
    slots = [fresh, repeated, empty, repeated, few, []]
    bags = [bag for slot in slots for bag in slot]
    lengths = torch.tensor([len(ids) for ids, _ in bags], dtype=torch.int32)
    ids = torch.tensor([i for ids, _ in bags for i in ids], dtype=dtype)
    weights = torch.ones(ids.numel()) if weighted else None

    def repeating(weights: torch.Tensor | None) -> list[bool]:
        looks = [True, True, True, False, True, True]
        return dedup_of("native", [0] * 6, worth=1 / 4).repeating(
            ids, lengths, weights, [len(slot) for slot in slots], looks
        )

    assert repeating(weights) == [False, True, False, False, True, True]
    if weighted:
        assert repeating(torch.arange(ids.numel()).float()) == [False] * 5 + [True]


@pytest.mark.parametrize("way", WAYS)
def test_few_bags_are_all_looked_at(way: str) -> None:
    slot = numbers(range(16), range(16))
    assert find(dedup_of(way, [0], worth=1.0), [slot]).bags_S == [16]


@pytest.mark.parametrize("way", WAYS)
def test_the_same_batch_is_always_the_same(way: str) -> None:
    """Whatever came before: a run that was resumed must not differ from one that was not."""
    dedup, slot = dedup_of(way, [0], worth=1 / 16), numbers(range(120), range(480))
    first = find(dedup, [slot]).number_B
    for _ in range(3):
        find(dedup, [numbers(range(600))])
    assert find(dedup, [slot]).number_B.equal(first)
