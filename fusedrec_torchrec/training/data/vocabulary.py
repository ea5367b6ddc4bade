"""Decides which values of a categorical column get a row of their own, and which row.

A value is a number of 32 or 64 bits: Criteo's are hashes in the text itself, those of other tables
are hashes of the text (``keys``).  Row 0 stands for a missing value, row 1 for a value that is too
rare or was never seen; the kept values follow in ascending order.  As they are hashes, neighbouring
rows have nothing in common and contiguous ranges of rows get equal shares of the load.

Counting is exact within a memory budget: a column with more distinct values than fit is counted
range of values by range of values, one pass over the column for each.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = [
    "MISSING",
    "RARE",
    "RESERVED",
    "build_vocabulary",
    "hashed_rows_of",
    "read_vocabulary",
    "rows_of",
]

MISSING, RARE, RESERVED = 0, 1, 2
VALUE_TYPES = (np.dtype(np.uint32), np.dtype(np.uint64))
# Sorting and merging hold about this many bytes for each distinct value.
BYTES_PER_VALUE = 64
BLOCK = 1 << 20

Values = NDArray[np.unsignedinteger[Any]]
Column = Callable[[], Iterable[Values]]


class _TooManyValuesError(Exception):
    """A range has more distinct values than fit into memory."""


def rows_of(values: Values, missing: NDArray[np.bool_], vocabulary: Values) -> NDArray[np.int32]:
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


def hashed_rows_of(
    values: Values, missing: NDArray[np.bool_], table_rows: int
) -> NDArray[np.int32]:
    """Returns the table row of each value where values share rows by chance, but for row 0."""
    rows = (1 + values % values.dtype.type(table_rows - 1)).astype(np.int32)
    rows[missing] = MISSING
    return rows


def read_vocabulary(path: Path) -> Values:
    """Maps the kept values of a column, which ``build_vocabulary`` wrote, into memory.

    Raises:
        ValueError: the file is damaged.
    """
    try:
        values = np.load(path, mmap_mode="r", allow_pickle=False)
    except Exception as error:  # a damaged header can raise anything
        raise ValueError(f"{path} is damaged: {error}") from None
    if not isinstance(values, np.ndarray) or values.dtype not in VALUE_TYPES or values.ndim != 1:
        raise ValueError(f"{path} is damaged: it is no list of values")
    return values


def build_vocabulary(
    column: Column,
    path: Path,
    min_count: int,
    max_rows: int | None,
    memory_bytes: int,
    value_type: type[np.unsignedinteger[Any]] = np.uint32,
) -> int:
    """Writes the kept values of a column to ``path`` (.npy, ascending) and returns their number.

    Args:
        column: gives the column's values, missing ones left out, in blocks, as often as asked.
        path: of the file.
        min_count: a value seen less often is rare.
        max_rows: the table's rows at most; the most frequent values are kept.
        memory_bytes: about what counting may use.
        value_type: of the values.
    """
    spool = path.with_suffix(".counts")
    budget = max(memory_bytes // BYTES_PER_VALUE, 1024)
    counted = _Counting(column, np.dtype(value_type), budget)
    with spool.open("wb") as out:
        for values, counts in counted.all():
            keep = counts >= min_count
            pairs = np.empty(int(keep.sum()), dtype=counted.pair_type)
            pairs["value"], pairs["count"] = values[keep], counts[keep]
            out.write(pairs.tobytes())
    pairs_total = spool.stat().st_size // counted.pair_type.itemsize
    least, ties = _cut(spool, counted.pair_type, pairs_total, max_rows)

    kept = 0
    partial = path.with_suffix(".partial")
    with partial.open("wb") as out:
        for pairs in _blocks(spool, counted.pair_type):
            above, equal = pairs["count"] > least, pairs["count"] == least
            equal &= np.cumsum(equal) <= ties  # of equally frequent ones the smaller values
            ties -= int(equal.sum())
            chosen = pairs["value"][above | equal]
            kept += len(chosen)
            out.write(chosen.tobytes())
    finished = path.with_suffix(".finished")
    with finished.open("wb") as out:
        # An empty file cannot be mapped.
        np.save(out, np.memmap(partial, value_type, "r") if kept else np.zeros(0, value_type))
    finished.replace(path)
    partial.unlink()
    spool.unlink()
    return kept


class _Counting:
    """Counts the values of a column, in as many passes as memory needs.

    Args:
        column: gives the values.
        value_type: of the values.
        budget: how many distinct values fit into memory.
    """

    def __init__(self, column: Column, value_type: "np.dtype[Any]", budget: int) -> None:
        self._column = column
        self._type = value_type
        self._budget = budget
        self.pair_type = np.dtype([("value", value_type), ("count", np.int64)])

    def all(self) -> Iterator[tuple[Values, NDArray[np.int64]]]:
        """Yields all distinct values and their counts, ascending, in one or more pieces."""
        return self._counted(0, int(np.iinfo(self._type).max))

    def _counted(self, low: int, last: int) -> Iterator[tuple[Values, NDArray[np.int64]]]:
        """Yields those from ``low`` to ``last``."""
        try:
            yield self._count_range(low, last)
        except _TooManyValuesError:
            middle = (low + last) // 2
            yield from self._counted(low, middle)
            yield from self._counted(middle + 1, last)

    def _count_range(self, low: int, last: int) -> tuple[Values, NDArray[np.int64]]:
        values: Values = np.zeros(0, dtype=self._type)
        counts = np.zeros(0, dtype=np.int64)
        waiting: list[Values] = []
        all_of_them = (low, last) == (0, int(np.iinfo(self._type).max))
        first, end = self._type.type(low), self._type.type(last)
        for block in self._column():
            waiting.append(block if all_of_them else block[(block >= first) & (block <= end)])
            if sum(map(len, waiting)) >= self._budget:
                values, counts = _merge(values, counts, waiting)
                waiting = []
                if len(values) > self._budget:
                    raise _TooManyValuesError
        return _merge(values, counts, waiting)


def _merge(
    values: Values, counts: NDArray[np.int64], waiting: list[Values]
) -> tuple[Values, NDArray[np.int64]]:
    if not waiting:
        return values, counts
    new_values, new_counts = np.unique(np.concatenate(waiting), return_counts=True)
    both = np.concatenate([values, new_values])
    merged, inverse = np.unique(both, return_inverse=True)
    sums = np.zeros(len(merged), dtype=np.int64)
    np.add.at(sums, inverse, np.concatenate([counts, new_counts]))
    return merged, sums


def _cut(
    spool: Path, pair_type: "np.dtype[Any]", total: int, max_rows: int | None
) -> tuple[int, int]:
    """Returns the count above which all values are kept, and how many with just that count."""
    room = total if max_rows is None else max_rows - RESERVED
    if total <= room:
        return 0, 0
    by_count: Counter[int] = Counter()
    for pairs in _blocks(spool, pair_type):
        counts, values = np.unique(pairs["count"], return_counts=True)
        by_count.update(dict(zip(counts.tolist(), values.tolist(), strict=True)))
    kept = 0
    for count in sorted(by_count, reverse=True):
        if kept + by_count[count] > room:
            return count, room - kept
        kept += by_count[count]
    raise AssertionError("unreachable: more values than room")


def _blocks(spool: Path, pair_type: "np.dtype[Any]") -> Iterator[NDArray[np.void]]:
    with spool.open("rb") as pairs:
        while data := pairs.read(BLOCK * pair_type.itemsize):
            yield np.frombuffer(data, dtype=pair_type)
