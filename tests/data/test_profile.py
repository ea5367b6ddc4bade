"""Access statistics, against a count by hand."""

from pathlib import Path

import numpy as np
import pytest

from fusedrec_torchrec.data.profile import coverage, draw_coverage, profile, rows_for, share_of_top
from fusedrec_torchrec.data.synthetic import SyntheticData, SyntheticTable

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
