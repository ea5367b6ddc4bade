"""Buffers come back when nobody can see them any more, and not before."""

import gc

import torch

from fusedrec_torchrec.core.buffers import KEPT, SMALLEST, Buffers

CPU = torch.device("cpu")
SHAPE = (SMALLEST, 2)


def take(buffers: Buffers, name: str = "a", shape: tuple[int, ...] = SHAPE) -> torch.Tensor:
    return buffers.take(name, shape, torch.float32, CPU)


def test_a_dropped_tensor_makes_room_for_the_next() -> None:
    buffers = Buffers()
    first = take(buffers)
    assert first.shape == SHAPE and first.dtype == torch.float32
    assert first.data_ptr() % 64 == 0
    address = first.data_ptr()
    del first
    assert take(buffers).data_ptr() == address


def test_a_view_keeps_the_content() -> None:
    buffers = Buffers()
    view = take(buffers).fill_(1)[3:5]
    other = take(buffers)
    assert other.data_ptr() + other.nbytes <= view.data_ptr() or other.data_ptr() > view.data_ptr()
    other.fill_(2)
    assert view.eq(1).all()


def test_autograd_keeps_the_content() -> None:
    buffers = Buffers()
    weight = torch.ones((), requires_grad=True)
    product = (take(buffers).fill_(3) * weight).sum()
    take(buffers).fill_(5)
    product.backward()
    assert weight.grad is not None and int(weight.grad) == 3 * SHAPE[0] * SHAPE[1]


def test_numpy_keeps_the_content() -> None:
    buffers = Buffers()
    array = take(buffers).fill_(1).numpy()
    take(buffers).fill_(2)
    assert (array == 1).all()


def test_smaller_requests_share_the_memory_and_larger_ones_replace_it() -> None:
    buffers = Buffers()
    large = take(buffers)
    address = large.data_ptr()
    del large
    small = take(buffers, shape=(SMALLEST,))
    assert small.data_ptr() == address
    del small
    larger = take(buffers, shape=(SMALLEST, 5))
    assert len(buffers._free["a"]) == 0, "the one that was too small is gone"
    assert larger.numel() == SMALLEST * 5


def test_names_have_memory_of_their_own_and_keep_that_of_two_batches() -> None:
    buffers = Buffers()
    tensors = [take(buffers) for _ in range(5)]
    other = take(buffers, "b")
    assert len({t.data_ptr() for t in (*tensors, other)}) == 6
    del tensors, other
    gc.collect()
    assert len(buffers._free["a"]) == KEPT
    assert len(buffers._free["b"]) == 1


def test_small_tensors_are_ordinary_ones() -> None:
    buffers = Buffers()
    take(buffers, shape=(4, 4))
    assert not buffers._free
