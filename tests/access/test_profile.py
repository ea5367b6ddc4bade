"""Access statistics, against a count by hand."""

from pathlib import Path

import numpy as np
import pytest

from fusedrec_torchrec.access.hot_set import HotSet
from fusedrec_torchrec.access.profile import (
    coverage,
    covered_by,
    draw_coverage,
    profile,
    rows_for,
    sample_profile,
    share_of_top,
)
from fusedrec_torchrec.access.samples import Samples
from fusedrec_torchrec.access.synthetic import SyntheticData, SyntheticTable

SOURCE = SyntheticData(
    [SyntheticTable(name="a", rows=50), SyntheticTable(name="b", rows=400, pooling=3)], 2, 1000
)


def test_counts_and_distinct_ids_per_batch() -> None:
    result = profile(SOURCE, batch_size=300, samples=1000, progress=False)
    samples = SOURCE.read(0, 1000)
    assert samples.lengths is not None
    first = samples.ids[:1000]
    assert (result.tables[0].counts == np.bincount(first, minlength=50)).all()
    second = samples.ids[1000:]
    assert (result.tables[1].counts == np.bincount(second, minlength=400)).all()
    assert result.batches == 3 and result.samples == 1000
    by_hand = sum(len(set(first[i : i + 300].tolist())) for i in (0, 300, 600))
    assert result.tables[0].distinct_in_batches == by_hand
    top = result.tables[0].top(2)
    assert top[0] == (int(np.bincount(first).argmax()), int(np.bincount(first).max()))
    assert len(top) == 2 and top[0][1] >= top[1][1]


def test_coverage_figures() -> None:
    counts = np.array([0, 1, 6, 0, 3])
    assert coverage(counts).tolist() == [0.6, 0.9, 1.0]
    assert share_of_top(counts, 0.01) == 0.6  # at least one row
    assert share_of_top(counts, 2 / 3) == 0.9
    assert rows_for(counts, 0.6) == 1
    assert rows_for(counts, 0.9) == 2
    assert rows_for(counts, 0.91) == 3
    nothing = np.zeros(3, dtype=np.int64)
    assert share_of_top(nothing, 0.5) == 0 and rows_for(nothing, 0.5) == 0


def test_plot_and_bad_arguments(tmp_path: Path) -> None:
    draw_coverage(profile(SOURCE, 100, progress=False), tmp_path / "coverage.png")
    assert (tmp_path / "coverage.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(ValueError, match=r"batch size is 2000, must be in \[1, 1000\]"):
        profile(SOURCE, 2000, progress=False)
    with pytest.raises(ValueError, match="samples is 0, must be at least 1"):
        profile(SOURCE, 10, samples=0, progress=False)


def test_a_sample_of_all_is_the_truth() -> None:
    exact = profile(SOURCE, batch_size=100, progress=False)
    whole = sample_profile(SOURCE, 1.0, 10_000, progress=False)
    assert whole.samples == 1000 and whole.error == 0
    for table in exact.tables:
        counts = np.zeros(table.rows, dtype=np.int64)
        counts[whole.ids[table.name]] = whole.counts[table.name]
        assert (counts == table.counts).all()
        assert whole.accesses[table.name] == table.accesses
    hot = HotSet.most_used(whole, 30)
    best = np.sort(exact.all_counts())[::-1][:30].sum() / exact.all_counts().sum()
    assert covered_by(hot, exact) == pytest.approx(best)


def test_a_sample_is_spread_over_the_data() -> None:
    long = SyntheticData([SyntheticTable(name="a", rows=50)], 2, 100_000)
    sampled = sample_profile(long, 0.05, 10_000, progress=False)
    assert sampled.samples == pytest.approx(5000, rel=0.06)

    class Watched(SyntheticData):
        starts: list[int]

        def read(self, start: int, stop: int) -> Samples:
            self.starts.append(start)
            return super().read(start, stop)

    watched = Watched([SyntheticTable(name="a", rows=50)], 2, 100_000)
    watched.starts = []
    sample_profile(watched, 0.05, 10_000, progress=False)
    gaps = np.diff(watched.starts)
    assert watched.starts[0] == 0 and watched.starts[-1] > 90_000
    assert gaps.max() <= 2 * gaps.min()


def test_counters_bound_a_profile() -> None:
    small = sample_profile(SOURCE, 1.0, 20, progress=False)
    assert sum(map(len, small.ids.values())) <= 20 and small.error > 0
    exact = profile(SOURCE, batch_size=100, progress=False)
    for table in exact.tables:
        for row, count in zip(small.ids[table.name], small.counts[table.name], strict=True):
            assert table.counts[row] - small.error <= count <= table.counts[row]


@pytest.mark.parametrize(("share", "counters"), [(0.0, 10), (1.5, 10), (0.5, 0)])
def test_samples_out_of_range(share: float, counters: int) -> None:
    with pytest.raises(ValueError, match="must be"):
        sample_profile(SOURCE, share, counters, progress=False)
