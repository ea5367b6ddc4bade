"""Batches: every sample once, the same for any number of ranks, from any position, in processes."""

import time
from dataclasses import dataclass
from itertools import islice
from typing import ClassVar

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from torchrec.datasets.utils import Batch

from fusedrec_torchrec.access.samples import Samples
from fusedrec_torchrec.access.synthetic import SyntheticData, SyntheticTable
from fusedrec_torchrec.training.data.loader import Loader
from fusedrec_torchrec.training.data.order import Order
from fusedrec_torchrec.training.data.split import split


@dataclass(frozen=True)
class Numbered:
    """A source whose samples carry their own number."""

    sizes: tuple[int, ...]
    jagged: bool = False

    @property
    def samples(self) -> int:
        return sum(self.sizes)

    dense_features = 1
    left_out: ClassVar[list[str]] = []
    features: ClassVar[dict[str, str]] = {"x": "x", "y": "y"}
    weighted, held_out = False, None
    identity: ClassVar[dict[str, object]] = {}

    @property
    def table_rows(self) -> dict[str, int]:
        return {"x": 10_000, "y": 20_000}

    @property
    def blocks(self) -> NDArray[np.int64]:
        return np.array(self.sizes)

    def read(self, start: int, stop: int) -> Samples:
        assert 0 <= start < stop <= self.samples
        number = np.arange(start, stop)
        dense, labels = number[:, None].astype(np.float32), (number % 2).astype(np.float32)
        if not self.jagged:
            return Samples(dense, labels, np.concatenate([number, 10_000 + number]))
        lengths = np.stack([number % 3, np.full_like(number, 2)]).astype(np.int32)
        ids = np.concatenate([np.repeat(number, number % 3), np.repeat(10_000 + number, 2)])
        return Samples(dense, labels, ids, lengths)


def loader(
    source: Numbered | SyntheticData, rank: int = 0, ranks: int = 1, **options: int
) -> Loader:
    settings = {"batch_size": 24, "lanes": 12, "chunk_batches": 3, "shuffle": True, **options}
    part = (0, source.samples)
    return Loader(source, part, rank=rank, world_size=ranks, **settings)  # type: ignore[arg-type]


def numbers(batch: Batch) -> list[int]:
    return batch.dense_features[:, 0].int().tolist()


def check_consistent(batch: Batch, jagged: bool) -> None:
    """Labels, ids and lengths belong to the numbers in the dense feature."""
    own = torch.tensor(numbers(batch))
    assert torch.equal(batch.labels, (own % 2).float())
    features = batch.sparse_features
    assert features.keys() == ["x", "y"] and features.stride() == len(own)
    lengths = own % 3 if jagged else torch.ones_like(own)
    assert torch.equal(features["x"].lengths().long(), lengths)
    assert torch.equal(features["x"].values(), own.repeat_interleave(lengths))
    assert torch.equal(features["y"].values(), 10_000 + own.repeat_interleave(2 if jagged else 1))


@given(
    sizes=st.lists(st.integers(1, 90), min_size=1, max_size=12).filter(lambda s: sum(s) >= 24),
    jagged=st.booleans(),
    shuffle=st.booleans(),
    chunk_batches=st.integers(1, 5),
    seed=st.integers(0, 3),
)
@settings(max_examples=40)
def test_an_epoch_has_every_sample_at_most_once(
    sizes: list[int], jagged: bool, shuffle: bool, chunk_batches: int, seed: int
) -> None:
    source = Numbered(tuple(sizes), jagged)
    batches = loader(source, shuffle=shuffle, chunk_batches=chunk_batches, seed=seed)
    seen: list[int] = []
    for batch in batches.read(0, batches.batches):
        check_consistent(batch, jagged)
        seen += numbers(batch)
    assert len(seen) == len(set(seen)) == source.samples // 24 * 24
    if not shuffle:
        assert seen == list(range(len(seen)))


@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("ranks", [2, 3, 4, 12])
def test_batches_do_not_depend_on_the_number_of_ranks(shuffle: bool, ranks: int) -> None:
    source = Numbered((50, 60, 7, 100, 83), jagged=True)
    alone = list(loader(source, shuffle=shuffle).read(0, 30))
    shared = [list(loader(source, r, ranks, shuffle=shuffle).read(0, 30)) for r in range(ranks)]
    for i, batch in enumerate(alone):
        parts = [mine[i] for mine in shared]
        assert [n for part in parts for n in numbers(part)] == numbers(batch)
        for part in parts:
            check_consistent(part, jagged=True)


def test_each_rank_reads_only_its_own_samples() -> None:
    source = Numbered((300,))
    read: list[tuple[int, int]] = []

    class Watched(Numbered):
        def read(self, start: int, stop: int) -> Samples:
            read.append((start, stop))
            return source.read(start, stop)

    list(loader(Watched((300,)), 1, 3).read(0, 12))
    assert sum(stop - start for start, stop in read) == 12 * 24 // 3


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("start", [0, 1, 5, 12, 29, 100])
def test_reading_from_any_position_goes_on_as_if_from_the_start(workers: int, start: int) -> None:
    source = SyntheticData([SyntheticTable(name="x", rows=10, pooling=2)], 1, 300)
    straight = list(loader(source).read(0, start + 7))[start:]
    jumped = list(loader(source, workers=workers).read(start, start + 7))
    assert len(jumped) == 7
    for ours, theirs in zip(jumped, straight, strict=True):
        assert torch.equal(ours.dense_features, theirs.dense_features)
        assert torch.equal(ours.sparse_features.values(), theirs.sparse_features.values())
        assert torch.equal(ours.labels, theirs.labels)


def test_epochs_are_shuffled_anew_and_seeds_matter() -> None:
    source = Numbered((100,) * 4)
    batches = loader(source)
    epochs = list(batches.read(0, 2 * batches.batches))
    assert numbers(epochs[0]) != numbers(epochs[batches.batches])
    assert numbers(next(loader(source, seed=1).read(0))) != numbers(epochs[0])
    assert numbers(next(loader(source).read(0))) == numbers(epochs[0])
    # Lanes and chunks do not repeat each other's permutation.
    order = np.array([numbers(batch) for batch in epochs[:3]])
    assert len({tuple(row) for row in (order - order.min(axis=1, keepdims=True))}) == 3


def test_a_part_of_the_source_is_read_and_nothing_else() -> None:
    for first, count in ((0, 135), (60, 70), (101, 49)):
        part = Loader(
            Numbered((40, 40, 40, 30)),
            (first, count),
            batch_size=12,
            lanes=4,
            rank=0,
            world_size=1,
            shuffle=True,
        )
        seen = {n for batch in part.read(0, part.batches) for n in numbers(batch)}
        assert seen <= set(range(first, first + count)) and len(seen) == count // 12 * 12


def test_every_kind_of_shuffling_depends_on_epoch_seed_and_place() -> None:
    def order(seed: int = 0) -> Order:
        return Order(
            first=0,
            blocks=(10,) * 40,
            batch_size=40,
            lanes=2,
            chunk_batches=2,
            shuffle=True,
            seed=seed,
        )

    def permutation(seed: int, *place: int) -> tuple[int, ...]:
        found = order(seed).permutation(*place)
        assert found is not None
        return tuple(found.tolist())

    places = [(0, 0, 0, 0), (1, 0, 0, 0), (0, 1, 0, 0), (0, 0, 1, 0), (0, 0, 0, 1)]
    assert len({permutation(*place) for place in places}) == 5
    blocks = [tuple(order(s).pieces(e, 0, 0)) for s, e in ((0, 0), (1, 0), (0, 1))]
    assert len(set(blocks)) == 3
    assert [piece.start for piece in blocks[0]] != sorted(piece.start for piece in blocks[0])


def test_endless_reading_and_waiting_time() -> None:
    batches = loader(Numbered((100,)))
    assert len(list(islice(batches.read(0), 50))) == 50
    begun = time.perf_counter()
    before = batches.waited
    list(islice(batches.read(0), 50))
    assert 0 < batches.waited - before <= time.perf_counter() - begun


def test_split_keeps_the_end_for_evaluation() -> None:
    assert split(Numbered((100, 50)), 0.1) == ((0, 135), (135, 15))
    assert split(Numbered((100, 57)), 0.1) == ((0, 141), (141, 16))
    held_out = Loader(
        Numbered((100, 50)),
        (135, 15),
        batch_size=5,
        lanes=1,
        rank=0,
        world_size=1,
        shuffle=False,
    )
    assert [numbers(b) for b in held_out.read(0, 3)] == [
        list(range(start, start + 5)) for start in (135, 140, 145)
    ]


def test_settings_that_do_not_fit_are_named() -> None:
    with pytest.raises(ValueError, match=r"data.lanes is 12, must be a multiple .* ranks, 5"):
        loader(Numbered((100,)), 0, 5)
    with pytest.raises(ValueError, match="batch size is 25, must be a multiple of lanes, 12"):
        loader(Numbered((100,)), batch_size=25)
    with pytest.raises(ValueError, match="23 samples do not fill one batch of 24"):
        next(loader(Numbered((23,))).read(0))
