"""Values to rows, counted exactly in little memory."""

from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fusedrec_torchrec.training.data import vocabulary
from fusedrec_torchrec.training.data.vocabulary import (
    MISSING,
    RARE,
    RESERVED,
    build_vocabulary,
    rows_of,
)


def expected(values: list[int], min_count: int, max_rows: int | None) -> list[int]:
    counts = Counter(values)
    kept = [value for value, count in counts.items() if count >= min_count]
    if max_rows is not None:
        kept = sorted(kept, key=lambda v: (-counts[v], v))[: max_rows - RESERVED]
    return sorted(kept)


@given(
    st.lists(st.one_of(st.integers(0, 20), st.integers(0, 2**32 - 1)), max_size=300),
    st.integers(1, 3),
    st.one_of(st.none(), st.integers(3, 12)),
)
def test_vocabulary_is_the_frequent_values(
    tmp_path_factory: pytest.TempPathFactory,
    values: list[int],
    min_count: int,
    max_rows: int | None,
) -> None:
    path = tmp_path_factory.mktemp("vocabulary") / "column.npy"
    blocks = np.array_split(np.array(values, dtype=np.uint32), 5)
    kept = build_vocabulary(lambda: blocks, path, min_count, max_rows, 1 << 20)
    assert np.load(path).tolist() == expected(values, min_count, max_rows)
    assert kept == len(np.load(path))
    assert [p.name for p in path.parent.iterdir()] == ["column.npy"]


def test_more_values_than_memory_takes_more_passes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    generator = np.random.default_rng(0)
    values = generator.integers(0, 2**32, 40_000, dtype=np.uint32)
    values = np.concatenate([values, values[:5000]])
    blocks = np.array_split(values, 50)
    passes, largest = 0, 0
    merge = vocabulary._merge

    def column() -> list[np.ndarray]:
        nonlocal passes
        passes += 1
        return blocks

    def watched(*args: object) -> tuple[np.ndarray, np.ndarray]:
        nonlocal largest
        result = merge(*args)  # type: ignore[arg-type]
        largest = max(largest, len(result[0]))
        return result

    monkeypatch.setattr(vocabulary, "_merge", watched)
    path = tmp_path / "column.npy"
    budget = 2000
    build_vocabulary(column, path, 2, None, budget * vocabulary.BYTES_PER_VALUE)
    unique, counts = np.unique(values, return_counts=True)
    assert (np.load(path) == unique[counts >= 2]).all()
    assert passes > 10
    assert largest <= 2 * budget + 1000  # at most one block beyond the budget


def test_rows_of_missing_rare_and_kept_values() -> None:
    kept = np.array([5, 7, 4_000_000_000], dtype=np.uint32)
    values = np.array([5, 6, 7, 4_000_000_000, 4_294_967_295, 0, 0], dtype=np.uint32)
    missing = np.array([False] * 6 + [True])
    assert rows_of(values, missing, kept).tolist() == [2, RARE, 3, 4, RARE, RARE, MISSING]
    nothing = np.zeros(0, dtype=np.uint32)
    assert rows_of(values, missing, nothing).tolist() == [RARE] * 6 + [MISSING]
