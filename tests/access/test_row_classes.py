"""Distinct rows of a batch: expected, and counted."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fusedrec_torchrec.access.access_profile import AccessProfile
from fusedrec_torchrec.access.profile import sample_profile
from fusedrec_torchrec.access.recorder import Recorder
from fusedrec_torchrec.access.row_classes import RowClasses
from fusedrec_torchrec.access.samples import ids_by_feature
from fusedrec_torchrec.access.synthetic import SyntheticData, SyntheticTable


def source(zipf: float, rows: int = 20_000, samples: int = 65_536) -> SyntheticData:
    return SyntheticData(
        [SyntheticTable(name="t", rows=rows, zipf=zipf)], dense_features=1, samples=samples
    )


def counted_unique(data: SyntheticData, batch: int) -> float:
    """Distinct rows of a batch, mean over all batches."""
    starts = range(0, data.samples - batch + 1, batch)
    return float(np.mean([len(np.unique(data.read(s, s + batch).ids)) for s in starts]))


@pytest.mark.parametrize("zipf", [0.0, 0.8, 1.0, 1.3, 2.0])
@pytest.mark.parametrize("rows", [3, 5000, 2_000_000])
def test_classes_hold_all_rows_and_all_accesses(zipf: float, rows: int) -> None:
    classes = RowClasses.zipf(rows, zipf)
    assert classes.rows == rows
    assert float((classes.rows_C * classes.shares_C).sum()) == pytest.approx(1.0)
    assert (np.diff(classes.shares_C) <= 1e-12).all()
    assert len(classes.rows_C) < 5000


@pytest.mark.parametrize("zipf", [0.0, 0.9, 1.1, 1.3])
@pytest.mark.parametrize("batch", [256, 4096])
def test_zipf_against_drawn_batches(zipf: float, batch: int) -> None:
    data = source(zipf)
    assert RowClasses.zipf(20_000, zipf).unique(batch) == pytest.approx(
        counted_unique(data, batch), rel=0.01
    )


@pytest.mark.parametrize("zipf", [0.9, 1.3])
@pytest.mark.parametrize("share", [1.0, 0.05])
def test_a_profile_against_the_data_it_is_of(zipf: float, share: float) -> None:
    """A sample of 5 % is enough, with Good and Turing's help; without it, it is far off."""
    data = source(zipf)
    profile = sample_profile(data, share, 1 << 20, progress=False)
    want = counted_unique(data, 2048)
    got = RowClasses.counted(profile, "t").unique(2048)
    assert got == pytest.approx(want, rel=0.02 if share == 1 else 0.06)
    if share < 1:
        as_whole = AccessProfile(**{**vars(profile), "of_samples": profile.samples})
        without_help = RowClasses.counted(as_whole, "t").unique(2048)
        assert abs(without_help - want) > 2 * abs(got - want)


def test_few_counters_still_give_the_rest_to_other_rows() -> None:
    data = source(1.1)
    recorder = Recorder({"t": 20_000}, 500)
    samples = data.read(0, data.samples)
    recorder.add(list(ids_by_feature(samples, 1)), len(samples))
    classes = RowClasses.counted(recorder.profile(), "t")
    assert classes.rows == 20_000
    assert float((classes.rows_C * classes.shares_C).sum()) == pytest.approx(1.0)
    assert classes.unique(2048) == pytest.approx(counted_unique(data, 2048), rel=0.15)


def test_a_table_that_was_never_used_is_uniform() -> None:
    profile = Recorder({"t": 10}, 5).profile()
    assert RowClasses.counted(profile, "t").unique(1) == pytest.approx(1.0)


@given(st.integers(1, 500), st.floats(0, 2), st.integers(0, 600), st.floats(0, 5000))
def test_hot_rows_leave_the_others(rows: int, zipf: float, hot: int, ids: float) -> None:
    classes = RowClasses.zipf(rows, zipf)
    left = classes.without(hot)
    assert left.rows == pytest.approx(max(rows - hot, 0))
    assert 0 <= classes.coverage(hot) <= 1 + 1e-9
    assert left.unique(ids) <= classes.unique(ids) + 1e-9
    # One by one, as the formula has it.
    shares = np.repeat(classes.shares_C, classes.rows_C.astype(int)).clip(max=1 - 1e-15)
    by_hand = float((1 - (1 - shares[hot:]) ** ids).sum())
    assert left.unique(ids) == pytest.approx(by_hand, abs=1e-6)
