"""Bags of one-hot data: fixed for each id, of the sizes asked for, spread over the table."""

from typing import cast

import numpy as np
import pytest

from fusedrec_torchrec.access.samples import Source
from fusedrec_torchrec.access.synthetic import SyntheticData, SyntheticTable
from fusedrec_torchrec.bench.multi_hot import MultiHotSource, fixed_bags

ROWS = (1000, 50, 7)
SIZES = (3, 1, 20)


def one_hot() -> SyntheticData:
    return SyntheticData(
        [SyntheticTable(name=f"t{i}", rows=rows) for i, rows in enumerate(ROWS)], 2, 5000
    )


def source(seed: int = 0) -> MultiHotSource:
    return MultiHotSource(one_hot(), SIZES, seed)


def test_a_bag_begins_with_its_id_and_has_its_size() -> None:
    plain, bags = one_hot().read(100, 400), source().read(100, 400)
    assert bags.lengths is not None
    assert bags.lengths.tolist() == [[size] * 300 for size in SIZES]
    start = 0
    for ids, size, rows in zip(plain.ids.reshape(3, 300), SIZES, ROWS, strict=True):
        of_table = bags.ids[start : start + 300 * size].reshape(300, size)
        start += 300 * size
        assert (of_table[:, 0] == ids).all()
        assert of_table.min() >= 0 and of_table.max() < rows
    assert start == len(bags.ids)
    assert (bags.dense == plain.dense).all() and (bags.labels == plain.labels).all()


def test_the_same_id_has_the_same_bag_wherever_it_is_read() -> None:
    whole = source().read(0, 2000)
    part = source().read(500, 900)
    same = whole.take(np.arange(500, 900))
    assert (part.ids == same.ids).all()
    first = whole.ids[: 2000 * 3].reshape(2000, 3)
    assert len(np.unique(first, axis=0)) == len(np.unique(first[:, 0]))


def test_tables_and_seeds_have_bags_of_their_own() -> None:
    ids = np.arange(500)
    bags = fixed_bags(ids, 4, 10**6, table=0)
    assert (bags == fixed_bags(ids, 4, 10**6, table=0)).all()
    for other in (fixed_bags(ids, 4, 10**6, table=1), fixed_bags(ids, 4, 10**6, 0, seed=1)):
        assert (other[:, 0] == ids).all()
        assert (other[:, 1:] == bags[:, 1:]).mean() < 0.01
    assert (source(1).read(0, 100).ids != source().read(0, 100).ids).any()
    assert source(1).identity != source().identity


def test_rows_of_bags_are_uniform_over_the_table() -> None:
    drawn = fixed_bags(np.arange(2000), 101, 100, table=3)[:, 1:]
    counts = np.bincount(drawn.ravel(), minlength=100)
    assert np.abs(counts - 2000).max() < 6 * np.sqrt(2000)
    positions = [np.bincount(drawn[:, i], minlength=100).max() for i in range(100)]
    assert max(positions) < 60  # 20 are expected at every position


def test_large_ids_and_tables_stay_in_range() -> None:
    rows = 10**9
    bags = fixed_bags(np.array([rows - 1, 0, 123_456_789]), 50, rows, table=25)
    assert bags.min() >= 0 and bags.max() < rows
    assert len(np.unique(bags)) == bags.size


def test_it_acts_like_the_data_it_is_made_of() -> None:
    made, plain = source(), one_hot()
    typed: Source = cast(Source, made)
    assert (typed.samples, typed.dense_features) == (plain.samples, plain.dense_features)
    assert typed.table_rows == plain.table_rows and typed.left_out == plain.left_out
    assert (typed.blocks == plain.blocks).all()


def test_sizes_for_other_tables_are_refused() -> None:
    with pytest.raises(ValueError, match="sizes for 2 tables, the data has 3 tables"):
        MultiHotSource(one_hot(), (1, 2))
