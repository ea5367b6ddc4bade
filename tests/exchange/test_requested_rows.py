"""Rows that are asked for: distinct bags are pooled first where that saves enough."""

import pytest
import torch
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from fusedrec_torchrec.core import native
from fusedrec_torchrec.exchange.options import ExchangeOptions
from fusedrec_torchrec.exchange.replication import Replications
from fusedrec_torchrec.exchange.requested_rows import RequestedRows, RowRequests
from tests.exchange.test_layout import layout_of

NEEDS_NATIVE = pytest.mark.skipif(not native.available(), reason="needs a C++ compiler")
A, B, C, D = (1, 2, 3, 4), (3, 4, 5, 6), (5, 6, 7, 8), (2, 4, 6, 8)
LONG = tuple(range(10))


def requested(
    *slots: list[tuple[int, ...]], pooled: bool = True, with_native: bool = True
) -> RequestedRows:
    """Returns what bags of slots of different tables ask for."""
    with pytest.MonkeyPatch.context() as patch:
        if not with_native:
            patch.setattr(native, "available", lambda: False)
        layout = layout_of([8] * len(slots), [[0, 5, 10]] * len(slots))
        mean_S = torch.zeros(len(slots), dtype=torch.bool) if pooled else None
        requests = RowRequests(layout, ExchangeOptions(), mean_S, False, False, Replications())
        features = KeyedJaggedTensor(
            keys=[feature for feature, _ in layout.slot_names],
            values=torch.tensor([i for bags in slots for bag in bags for i in bag]),
            lengths=torch.tensor([len(bag) for bags in slots for bag in bags], dtype=torch.int32),
        )
        return requests(features)


@NEEDS_NATIVE
@pytest.mark.parametrize(
    ("slots", "distinct_bags"),
    [
        ([[A, A, A, A]], 1),  # 12 ids less to read, for 4 bags to copy
        ([[A, A, B, C]], 3),  # 4 for 4: as much as it must save
        ([[A, A, B, C, D]], None),  # less than a quarter of the bags repeat
        ([[(*LONG, 1, 2, 3), (1,), (1,), (2,)]], None),  # 1 for 4
        ([[(*LONG, 1, 2), (1, 2), (1, 2), (3,)]], None),  # 2 for 4
        ([[LONG, (1, 2, 3), (1, 2, 3), ()]], 2),  # 3 for 3: empty bags cost nothing
        ([[A, B, C, D]], None),  # nothing is saved
        ([[LONG[:8]] * 2, [(1, 2), (3, 4)]], 3),  # 8 for 4 of both slots
        ([[LONG[:5]] * 2, [(1,), (2,)], [(3,), (4,)]], None),  # 5 for 6 of all slots
    ],
    ids=str,
)
def test_bags_are_pooled_once_if_as_many_ids_are_saved_as_there_are_full_bags(
    slots: list[list[tuple[int, ...]]], distinct_bags: int | None
) -> None:
    got = requested(*slots)
    if distinct_bags is None:
        assert got.distinct is None and sum(got.ids_per_bucket) == sum(
            len(bag) for bags in slots for bag in bags
        )
    else:
        assert got.distinct is not None and sum(got.distinct.bags_S) == distinct_bags
        assert sum(got.ids_per_bucket) == got.distinct.ids_M.numel()


@NEEDS_NATIVE
def test_short_bags_and_sequences_are_not_looked_at() -> None:
    assert requested([(1, 2, 3)] * 4).looks == [False]
    assert requested([A, A], [(1,), (1,)]).looks == [True, False]
    assert requested([A, A, A, A], pooled=False).looks == [False]


def test_without_native_operators_all_bags_are_pooled_as_they_are() -> None:
    got = requested([A, A, A, A], with_native=False)
    assert got.looks == [False] and got.distinct is None
