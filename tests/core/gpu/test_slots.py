"""Batches slot after slot, and raw ids to rows: as torch has them."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fusedrec_torchrec.exchange.hashing import hash_ids

pytest.importorskip("triton")
from tests.core.gpu.device import kernels_of

kernels = kernels_of("slots")

EXAMPLES = settings(max_examples=25, deadline=None)
IDS = {torch.int32: st.integers(0, 99), torch.int64: st.integers(-(1 << 62), 1 << 62)}
Bags = list[list[list[int]]]


@st.composite
def features(draw: st.DrawFn, dtype: torch.dtype) -> Bags:
    """[feature][bag] ids."""
    bag = st.lists(IDS[dtype], max_size=draw(st.sampled_from([2, 40])))
    return draw(st.lists(st.lists(bag, max_size=4), min_size=1, max_size=5))


def places_of(bags: Bags, order: list[int]) -> torch.Tensor:
    strides = torch.tensor([len(of_feature) for of_feature in bags])
    firsts = strides.cumsum(0) - strides
    return torch.stack([strides[order].cumsum(0), firsts[order]])


def flat(bags: Bags) -> tuple[list[int], list[int]]:
    ids = [i for of_feature in bags for bag in of_feature for i in bag]
    return ids, [len(bag) for of_feature in bags for bag in of_feature]


@EXAMPLES
@given(st.data(), st.sampled_from([torch.int32, torch.int64]), st.booleans())
def test_bags_of_slots_are_those_of_their_features(
    data: st.DataObject, dtype: torch.dtype, weighted: bool
) -> None:
    bags = data.draw(features(dtype))
    order = data.draw(st.lists(st.integers(0, len(bags) - 1), min_size=1, max_size=7))
    ids, lengths = flat(bags)
    given_ids = torch.tensor(ids, dtype=dtype)
    offsets = torch.tensor([0, *lengths]).cumsum(0)
    if data.draw(st.booleans()):
        offsets = offsets.int()
    weights = torch.arange(len(ids)) / 7 if weighted else None
    room = 7 * len(ids)
    want_ids, want_lengths = flat([bags[i] for i in order])
    taken, taken_weights, taken_lengths, taken_offsets = kernels.take_slots(
        given_ids, weights, offsets, places_of(bags, order), len(want_lengths), room
    )
    assert taken.numel() == room and taken.dtype == dtype
    assert taken[: len(want_ids)].tolist() == want_ids
    assert taken_lengths.tolist() == want_lengths
    assert taken_offsets.tolist() == [0, *torch.tensor(want_lengths).cumsum(0).tolist()]
    if weights is None:
        assert not taken_weights.numel()
    else:
        at = iter(range(len(ids)))
        numbered = [[[next(at) for _ in bag] for bag in of_feature] for of_feature in bags]
        places = flat([numbered[i] for i in order])[0]
        assert torch.equal(taken_weights[: len(places)], weights[places])


@pytest.mark.parametrize(
    "offsets", [[0, 5, 2, 9], [0, -3, 4, 4], [7, 8, 900, 1000], [0, 1 << 30, 3, 4]]
)
@pytest.mark.parametrize("room", [0, 1, 4, 8])
def test_nothing_is_overrun_if_lengths_are_wrong(
    offsets: list[int], room: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Memory behind the ids that are given and taken is watched."""
    ids = torch.arange(14)
    ids[4:] = -77
    made: list[torch.Tensor] = []

    def watched(size: int, **kwargs: Any) -> torch.Tensor:
        made.append(torch.full((size + 20,), -1, **kwargs))
        return made[-1][:size]

    monkeypatch.setattr(torch, "empty", watched)
    places = torch.tensor([[2, 4, 6], [1, 0, 1]])
    taken, _, lengths, _ = kernels.take_slots(ids[:4], None, torch.tensor(offsets), places, 6, room)
    monkeypatch.undo()
    assert (lengths >= 0).all()
    assert not (taken == -77).any()
    assert (made[0][room:] == -1).all()


def test_no_ids_are_taken_if_lengths_are_known_to_be_wrong() -> None:
    ids, offsets = torch.arange(9), torch.tensor([0, 9] * 5)
    places = torch.tensor([[9], [0]])
    for refused, total in ((None, 45), (False, 45), (True, 0)):
        verdict = None if refused is None else torch.tensor(refused)
        _, _, lengths, starts = kernels.take_slots(ids, None, offsets, places, 9, 9, verdict)
        assert int(lengths.sum()) == int(starts[-1]) == total


@EXAMPLES
@given(st.data(), st.sampled_from([torch.int32, torch.int64]))
def test_raw_ids_are_hashed_by_the_salt_of_their_slot(
    data: st.DataObject, dtype: torch.dtype
) -> None:
    counts = data.draw(st.lists(st.integers(0, 300), min_size=1, max_size=6))
    ids = torch.tensor(
        data.draw(st.lists(IDS[dtype], min_size=sum(counts), max_size=sum(counts))), dtype=dtype
    )
    raw = torch.tensor(data.draw(st.lists(st.integers(0, 1), min_size=6, max_size=6)))
    slots = len(counts)
    salts = torch.stack([raw[:slots], torch.arange(slots) * 12345678912345], 1)
    rows = torch.arange(slots) * 1000 + 7
    before = torch.full((3,), 5, dtype=dtype)  # of other slots
    ends = torch.tensor(counts).cumsum(0) + 3
    got = kernels.hash_slots(torch.cat([before, ids, before]), ends.int(), rows, salts)
    slot = torch.arange(slots).repeat_interleave(torch.tensor(counts))
    hashed = hash_ids(ids, salts[slot, 1], rows[slot])
    want = torch.where(salts[slot, 0] != 0, hashed, ids.long())
    assert got[3:-3].tolist() == want.tolist()
