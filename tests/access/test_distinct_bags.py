"""Distinct bags: counted exactly, by chance as drawing shows, and kept in profiles."""

from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from fusedrec_torchrec.access.access_profile import AccessProfile
from fusedrec_torchrec.access.array_file import write_arrays
from fusedrec_torchrec.access.bag_counts import BagCounter, CountedBags, bag_keys, distinct_bags
from fusedrec_torchrec.access.distinct_bags import BagsByChance
from fusedrec_torchrec.access.profile import profile, sample_profile
from fusedrec_torchrec.access.recorder import Recorder, merged
from fusedrec_torchrec.access.row_classes import RowClasses
from fusedrec_torchrec.access.samples import Samples
from fusedrec_torchrec.access.synthetic import SyntheticData, SyntheticTable


def flat(bags: list[list[int]]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    ids = np.array([i for bag in bags for i in bag], np.int64)
    return ids, np.array([len(bag) for bag in bags], np.int64)


def test_bags_differ_in_ids_order_and_length() -> None:
    bags = [[1, 2], [2, 1], [], [1, 2], [1], [1, 2, 3], [3], [1], [1, 2, 2], [0], [0, 0]]
    keys, lengths = bag_keys(*flat(bags))
    assert len(keys) == 10  # the empty one is not among them
    full = [tuple(bag) for bag in bags if bag]
    for key, bag in zip(keys, full, strict=True):
        for other, same in zip(keys, full, strict=True):
            assert (key == other) == (bag == same)
    assert distinct_bags(keys, lengths) == (8, 2 + 2 + 1 + 3 + 1 + 3 + 1 + 2)
    assert len(bag_keys(*flat([[], []]))[0]) == 0


@pytest.mark.parametrize(
    ("rows", "zipf", "length", "samples"),
    [(3, 0.0, 2, 1000), (50, 0.0, 2, 2000), (100, 1.2, 3, 4000), (10, 1.0, 5, 4000), (1, 0, 20, 9)],
)
def test_bags_by_chance_are_as_distinct_as_drawn_ones(
    rows: int, zipf: float, length: int, samples: int
) -> None:
    classes = RowClasses.zipf(rows, zipf) if zipf else RowClasses.uniform(rows)
    chances = np.repeat(classes.shares_C, classes.rows_C.astype(int))
    random = np.random.default_rng(0)
    drawn = [
        len(set(map(tuple, random.choice(rows, (samples, length), p=chances / chances.sum()))))
        for _ in range(8)
    ]
    found = BagsByChance(classes, length).distinct(samples)
    assert found.bags == pytest.approx(np.mean(drawn), rel=0.02)
    assert found.ids == pytest.approx(length * found.bags)


def test_bags_of_one_id_are_as_distinct_as_rows_and_long_ones_all_differ() -> None:
    classes = RowClasses.zipf(10_000, 1.05)
    assert BagsByChance(classes, 1.0).distinct(500).bags == pytest.approx(classes.unique(500))
    assert BagsByChance(classes, 0.5).distinct(500).bags == pytest.approx(classes.unique(250))
    assert BagsByChance(classes, 0.5).full == 0.5
    assert BagsByChance(classes, 20.0, bags=2).distinct(500) == pytest.approx((1000, 20_000))
    assert BagsByChance(classes, 0.0).distinct(500) == (0, 0)


def test_generated_bags_are_as_distinct_as_estimated() -> None:
    table = SyntheticTable(name="a", rows=300, pooling=2.5, zipf=1.2)
    counted = profile(SyntheticData([table], 1, 20_000), 2000, progress=False)
    bags = BagsByChance(RowClasses.zipf(300, 1.2), 2.5, scattered=True).distinct(2000)
    (seen,) = counted.tables
    assert seen.distinct_bags_in_batches / 10 == pytest.approx(bags.bags, rel=0.02)
    assert seen.ids_of_distinct_bags / 10 == pytest.approx(bags.ids, rel=0.02)
    assert seen.bags_in_batches == 20_000


class Repeating(SyntheticData):
    """Every bag is one of 100."""

    def read(self, start: int, stop: int) -> Samples:
        which = np.random.default_rng(start).integers(0, 100, stop - start)
        lengths = 1 + which % 7
        ids = np.concatenate([100 * bag + np.arange(1 + bag % 7) for bag in which])
        plain = super().read(start, stop)
        return Samples(plain.dense, plain.labels, ids, lengths[None].astype(np.int32))


def test_a_profile_knows_bags_that_repeat(tmp_path: Path) -> None:
    source = Repeating([SyntheticTable(name="a", rows=10_000)], 1, 10_000)
    sampled = sample_profile(source, 1.0, 10**6, progress=False)
    sampled.save(tmp_path / "profile.npz")
    bags = AccessProfile.load(tmp_path / "profile.npz").bags["a"]
    assert bags.samples_K.tolist() == [64, 256, 1024, 4096]
    # As many as a hundred alike, at sizes that were counted and others.
    law = BagsByChance(RowClasses.uniform(100), 1.0)
    for size in (64, 300, 1024, 3000):
        assert bags.distinct(size).bags == pytest.approx(law.distinct(size).bags, rel=0.1)
    assert bags.distinct(4096).ids == pytest.approx(sum(1 + bag % 7 for bag in range(100)))
    assert bags.distinct(20_000).bags == pytest.approx(100, rel=0.1)  # never counted
    both = merged([sampled, sampled]).bags["a"]
    assert both.counted == 20_000 and both.distinct(1024) == bags.distinct(1024)
    longer = sample_profile(source, 0.1, 10**6, progress=False)
    together = merged([longer, sampled]).bags["a"]
    assert together.samples_K.tolist() == [64, 256, 1024, 4096]


def test_bags_of_one_id_need_no_counts() -> None:
    tables = [SyntheticTable(name="a", rows=50), SyntheticTable(name="b", rows=50, pooling=3.0)]
    assert set(sample_profile(SyntheticData(tables, 1, 3000), 1.0, 99, progress=False).bags) == {
        "b"
    }


def test_a_table_with_too_few_samples_has_bags_that_all_differ() -> None:
    counter = BagCounter()
    counter.add(*flat([[1, 2], [1, 2], []]))
    assert counter.result().distinct(300) == pytest.approx((200, 400))


def test_older_profiles_say_nothing_of_bags(tmp_path: Path) -> None:
    recorder = Recorder({"a": 5}, 10)
    recorder.add([np.array([1, 1, 2])], 3)
    recorder.profile().save(tmp_path / "profile.npz")
    assert AccessProfile.load(tmp_path / "profile.npz").bags == {}


def test_damaged_counts_of_bags_are_refused(tmp_path: Path) -> None:
    numbers = np.array([64, 16], np.int64)
    damaged = CountedBags(numbers, numbers, numbers, numbers, 5, 5, 9)
    recorder = Recorder({"a": 5}, 10)
    whole = recorder.profile()
    whole.bags["a"] = damaged
    whole.save(tmp_path / "profile.npz")
    with pytest.raises(ValueError, match=r"samples_K_0 is \[64, 16\], must be ascending"):
        AccessProfile.load(tmp_path / "profile.npz")
    arrays = {"ids_0": numbers[:0], "counts_0": numbers[:0], "bags_0": numbers}
    about = {"table_rows": {"a": 5}, "accesses": {"a": 0}, "samples": 1, "error": 0, "counters": 1}
    write_arrays(tmp_path / "other.npz", "access profile", about, arrays)
    with pytest.raises(ValueError, match="samples_K_0 is missing"):
        AccessProfile.load(tmp_path / "other.npz")


def test_bags_of_two_features_are_counted_with_the_samples_they_are_of() -> None:
    """Feature by feature, as they stand; batches are of samples, not of bags."""
    recorder = Recorder({"a": 1000}, 1000)
    first, second = np.repeat(np.arange(64), 2), np.arange(64) + 500  # bags of two, and of one
    lengths = np.concatenate([np.full(64, 2), np.ones(64, int)])
    for _ in range(2):  # the same 64 samples twice
        recorder.add([np.concatenate([first, second])], 64, [lengths])
    profile = recorder.profile()
    bags = profile.bags["a"]
    assert (profile.samples, profile.accesses["a"]) == (128, 2 * 192)
    assert (bags.counted, bags.full) == (128, 2.0)
    assert bags.distinct(64) == pytest.approx((128, 192))
