"""Equal bags are found, all others are told apart: in C++ and by torch's own operators."""

from collections.abc import Sequence
from typing import Any

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


def numbers(*runs: Sequence[int]) -> list[Bag]:
    return bags_of(*[(number, -number) for run in runs for number in run])


@pytest.mark.parametrize("way", WAYS)
def test_a_slot_whose_first_bags_do_not_repeat_stops_to_look(way: str) -> None:
    """It tries 128 of 512 bags, and would look on if a quarter of all bags seemed to repeat."""
    late = numbers(range(128), range(384))  # 128 bags that repeat, but not among the first
    early = numbers(range(10), range(10), range(492))
    got = find(dedup_of(way, [0, 1], worth=1 / 4), [late, early])
    assert got.bags_S == [512, 492] and got.full == 1024
    assert got.number_B[:512].tolist() == [*range(512)]
    assert find(dedup_of(way, [0, 1], worth=0.0), [late, early]).bags_S == [384, 492]


@pytest.mark.parametrize("way", WAYS)
def test_what_was_found_before_it_stopped_to_look_stays(way: str) -> None:
    """One repeat among the first 128 bags is too few to look on, but it counts as one bag."""
    slot = numbers([5], range(127), range(127), range(257))
    got = find(dedup_of(way, [0], worth=1 / 4), [slot])
    assert got.bags_S == [511] and got.number_B[6] == got.number_B[0] == 0
    # A bag of another slot of the table is like those that were looked at.
    got = find(dedup_of(way, [0, 0], worth=1 / 4), [slot, numbers(range(20))])
    assert got.bags_S == [511, 0]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    ("bags", "tried", "repeats", "looks_on"),
    [(512, 128, 7, False), (512, 128, 8, True), (8192, 512, 7, False), (8192, 512, 8, True)],
)
def test_as_many_first_bags_must_repeat_as_tell_of_enough_repeats(
    way: str, bags: int, tried: int, repeats: int, looks_on: bool
) -> None:
    """A sixteenth of many bags has a 256th of the repeats by chance: 8, if a quarter repeats."""
    slot = numbers(range(tried - repeats), range(repeats), range(bags - tried))
    got = find(dedup_of(way, [0], worth=1 / 4), [slot])
    assert got.bags_S == [bags - tried if looks_on else bags - repeats]


@NEEDS_NATIVE
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_slots_that_repeat_are_told_by_their_first_bags(weighted: bool, dtype: torch.dtype) -> None:
    repeated, fresh = numbers(range(64), range(64), range(384)), numbers(range(512))
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
    slot = numbers(range(32), range(32))
    assert find(dedup_of(way, [0], worth=1.0), [slot]).bags_S == [32]


@pytest.mark.parametrize("way", WAYS)
def test_the_same_batch_is_always_the_same(way: str) -> None:
    """Whatever came before: a run that was resumed must not differ from one that was not."""
    dedup, slot = dedup_of(way, [0], worth=1 / 16), numbers(range(60), range(60), range(480))
    first = find(dedup, [slot]).number_B
    for _ in range(3):
        find(dedup, [numbers(range(600))])
    assert find(dedup, [slot]).number_B.equal(first)
