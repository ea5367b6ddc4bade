"""Decides which values of a categorical column get a row of their own, and which row.

Row 0 stands for a missing value, row 1 for a value that is too rare or was never seen; the kept
values follow in ascending order.  Criteo's values are hashes, so neighbouring rows have nothing
in common and contiguous ranges of rows get equal shares of the load.

Counting is exact within a memory budget: a column with more distinct values than fit is counted
range of values by range of values, one pass over the column for each.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

__all__ = ["MISSING", "RARE", "RESERVED", "build_vocabulary", "read_vocabulary", "rows_of"]

MISSING, RARE, RESERVED = 0, 1, 2
VALUE_COUNT = np.dtype([("value", np.uint32), ("count", np.int64)])
# Sorting and merging hold about this many bytes for each distinct value.
BYTES_PER_VALUE = 64
BLOCK = 1 << 20

Column = Callable[[], Iterable[NDArray[np.uint32]]]


class _TooManyValuesError(Exception):
    """A range has more distinct values than fit into memory."""


def rows_of(
    values: NDArray[np.uint32],
    missing: NDArray[np.bool_],
    vocabulary: NDArray[np.uint32],
) -> NDArray[np.int32]:
    """Returns the table row of each value."""
    if len(vocabulary) == 0:
        rows = np.full(len(values), RARE, dtype=np.int32)
    else:
        place = np.searchsorted(vocabulary, values)
        place[place == len(vocabulary)] = 0
        kept = vocabulary[place] == values
        rows = np.where(kept, place + RESERVED, RARE).astype(np.int32)
    rows[missing] = MISSING
    return rows


def read_vocabulary(path: Path) -> NDArray[np.uint32]:
    """Maps the kept values of a column, which ``build_vocabulary`` wrote, into memory.

    Raises:
        ValueError: the file is damaged.
    """
    try:
        values = np.load(path, mmap_mode="r", allow_pickle=False)
    except Exception as error:  # a damaged header can raise anything
        raise ValueError(f"{path} is damaged: {error}") from None
    if not isinstance(values, np.ndarray) or values.dtype != np.uint32 or values.ndim != 1:
        raise ValueError(f"{path} is damaged: it is no list of values")
    return values


def build_vocabulary(
    column: Column, path: Path, min_count: int, max_rows: int | None, memory_bytes: int
) -> int:
    """Writes the kept values of a column to ``path`` (.npy, ascending) and returns their number.

    Args:
        column: gives the column's values, missing ones left out, in blocks, as often as asked.
        min_count: a value seen less often is rare.
        max_rows: the table's rows at most; the most frequent values are kept.
        memory_bytes: about what counting may use.
    """
    spool = path.with_suffix(".counts")
    budget = max(memory_bytes // BYTES_PER_VALUE, 1024)
    with spool.open("wb") as out:
        for values, counts in _counted(column, 0, 1 << 32, budget):
            keep = counts >= min_count
            pairs = np.empty(int(keep.sum()), dtype=VALUE_COUNT)
            pairs["value"], pairs["count"] = values[keep], counts[keep]
            out.write(pairs.tobytes())
    pairs_total = spool.stat().st_size // VALUE_COUNT.itemsize
    least, ties = _cut(spool, pairs_total, max_rows)

    kept = 0
    partial = path.with_suffix(".partial")
    with partial.open("wb") as out:
        for pairs in _blocks(spool):
            above, equal = pairs["count"] > least, pairs["count"] == least
            equal &= np.cumsum(equal) <= ties  # of equally frequent ones the smaller values
            ties -= int(equal.sum())
            chosen = pairs["value"][above | equal]
            kept += len(chosen)
            out.write(chosen.tobytes())
    finished = path.with_suffix(".finished")
    with finished.open("wb") as out:
        # An empty file cannot be mapped.
        np.save(out, np.memmap(partial, np.uint32, "r") if kept else np.zeros(0, np.uint32))
    finished.replace(path)
    partial.unlink()
    spool.unlink()
    return kept


def _counted(
    column: Column, low: int, high: int, budget: int
) -> Iterator[tuple[NDArray[np.uint32], NDArray[np.int64]]]:
    """Yields distinct values in [low, high) and their counts, ascending, in one or more pieces."""
    try:
        yield _count_range(column, low, high, budget)
    except _TooManyValuesError:
        middle = (low + high) // 2
        yield from _counted(column, low, middle, budget)
        yield from _counted(column, middle, high, budget)


def _count_range(
    column: Column, low: int, high: int, budget: int
) -> tuple[NDArray[np.uint32], NDArray[np.int64]]:
    values = np.zeros(0, dtype=np.uint32)
    counts = np.zeros(0, dtype=np.int64)
    waiting: list[NDArray[np.uint32]] = []
    for block in column():
        waiting.append(block[(block >= low) & (block < high)] if high - low < 1 << 32 else block)
        if sum(map(len, waiting)) >= budget:
            values, counts = _merge(values, counts, waiting)
            waiting = []
            if len(values) > budget:
                raise _TooManyValuesError
    return _merge(values, counts, waiting)


def _merge(
    values: NDArray[np.uint32], counts: NDArray[np.int64], waiting: list[NDArray[np.uint32]]
) -> tuple[NDArray[np.uint32], NDArray[np.int64]]:
    if not waiting:
        return values, counts
    new_values, new_counts = np.unique(np.concatenate(waiting), return_counts=True)
    both = np.concatenate([values, new_values])
    merged, inverse = np.unique(both, return_inverse=True)
    sums = np.zeros(len(merged), dtype=np.int64)
    np.add.at(sums, inverse, np.concatenate([counts, new_counts]))
    return merged, sums


def _cut(spool: Path, total: int, max_rows: int | None) -> tuple[int, int]:
    """Returns the count above which all values are kept, and how many with just that count."""
    room = total if max_rows is None else max_rows - RESERVED
    if total <= room:
        return 0, 0
    by_count: Counter[int] = Counter()
    for pairs in _blocks(spool):
        counts, values = np.unique(pairs["count"], return_counts=True)
        by_count.update(dict(zip(counts.tolist(), values.tolist(), strict=True)))
    kept = 0
    for count in sorted(by_count, reverse=True):
        if kept + by_count[count] > room:
            return count, room - kept
        kept += by_count[count]
    raise AssertionError("unreachable: more values than room")


def _blocks(spool: Path) -> Iterator[NDArray[np.void]]:
    with spool.open("rb") as pairs:
        while data := pairs.read(BLOCK * VALUE_COUNT.itemsize):
            yield np.frombuffer(data, dtype=VALUE_COUNT)
