"""Weights of positions, and sums of their gradients: as torch has them."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("triton")
from tests.core.gpu.device import kernels_of

kernels = kernels_of("positions")

EXAMPLES = settings(max_examples=25, deadline=None)


class Batch:
    """Bags of slots, some of which have the same weights."""

    def __init__(self, data: st.DataObject) -> None:
        limits = data.draw(st.lists(st.integers(1, 20), min_size=1, max_size=4))
        starts = [sum(limits[:i]) for i in range(len(limits))]
        self.weights = torch.arange(1.0, sum(limits) + 1)
        slots: list[list[int]] = []
        self.lengths: list[int] = []
        self.places: list[int] = []
        for feature in data.draw(st.lists(st.integers(0, len(limits) - 1), min_size=1)):
            start, limit = starts[feature], limits[feature]
            bags = data.draw(st.integers(0, 4) | st.just(70))
            slots.append([len(self.lengths), bags, start, limit])
            for i in range(bags):
                self.lengths.append((i * 7 + start) % (limit + 1))
                self.places += range(start, start + self.lengths[-1])
        self.slots = torch.tensor(slots)
        self.offsets = torch.tensor([0, *self.lengths]).cumsum(0).int()
        self.batch = max(bags for _, bags, _, _ in slots)


@EXAMPLES
@given(st.data())
def test_every_id_has_the_weight_of_its_position(data: st.DataObject) -> None:
    batch = Batch(data)
    ids = len(batch.places)
    got = kernels.position_weights(batch.weights, batch.slots, batch.offsets, batch.batch, ids + 3)
    assert got.numel() == ids + 3
    assert got[:ids].tolist() == batch.weights[batch.places].tolist()


@EXAMPLES
@given(st.data())
def test_gradients_are_added_up_by_position(data: st.DataObject) -> None:
    batch = Batch(data)
    gradient = torch.arange(len(batch.places)).float()
    got = torch.zeros_like(batch.weights)
    kernels.position_sums(gradient, batch.slots, batch.offsets, batch.batch, got)
    want = torch.zeros_like(got).index_add_(0, torch.tensor(batch.places).long(), gradient)
    torch.testing.assert_close(got, want)


def test_a_bag_of_too_many_ids_does_not_reach_the_weights_of_others() -> None:
    slots = torch.tensor([[0, 1, 0, 2], [1, 1, 2, 3]])
    offsets, got = torch.tensor([0, 4, 5]), torch.zeros(5)
    kernels.position_sums(torch.ones(5), slots, offsets, 1, got)
    assert got.tolist() == [1, 1, 1, 0, 0]
