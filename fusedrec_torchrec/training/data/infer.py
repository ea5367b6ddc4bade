"""Looks at files with columns, and suggests what samples can be made of them.

Memory is bounded, whatever the files are: blocks of rows, and for each column a sketch of its
distinct values (the smallest hashes: Bar-Yossef et al., RANDOM 2002).
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray
from tqdm import tqdm

from fusedrec_torchrec.training.data.bad_lines import BadLines
from fusedrec_torchrec.training.data.expression import columns_of, parse_expression
from fusedrec_torchrec.training.data.keys import keys_of
from fusedrec_torchrec.training.data.table_columns import (
    bags_of,
    flags_of,
    kind_of,
    numbers_of,
    texts_of,
    times_of,
)
from fusedrec_torchrec.training.data.table_files import TableFile, opened
from fusedrec_torchrec.training.data.table_options import CsvOptions, TimestampOptions

__all__ = ["ColumnFacts", "Suggestion", "look_at", "suggest"]

SKETCH = 1 << 14  # hashes that are kept of a column
MISSING = ("", "nan")
LABELS = (
    *("label", "click", "clicked", "is_click", "is_clicked", "target", "y", "converted"),
    *("conversion", "is_conversion", "purchased", "bought", "buy"),
)
IDENTIFIER = re.compile(r"(^|[_ ]|[a-z])(id|ids|key|code|hash|no|number)$", re.IGNORECASE)
TIME = re.compile(r"(^|[_ ])(time|timestamp|ts|date|datetime|unixtime)$|time$", re.IGNORECASE)
# What whole numbers count since 1970 if they lie between 1973 and 2100, or thereabouts.
UNITS = {"s": (1e8, 4.2e9), "ms": (1e11, 4.2e12), "us": (1e14, 4.2e15), "ns": (1e17, 4.2e18)}
SEPARATORS = ("|", ";")
FEW, MANY = 1000, 5_000_000  # distinct values
CROWDED = 0.1  # where in its range the mean of a quantity is, at most
ALL_DIFFER = 0.95  # share of distinct values at which a column names the row itself


@dataclass
class ColumnFacts:
    """Says what a column holds, of the rows seen so far.

    Attributes:
        name: of the column.
        type: of its values, in words of the file.
        is_list: whether it holds lists.
        rows: how many were seen.
        values: how many values, of lists all of them.
        missing: rows without a value; of lists, empty ones.
        numeric: whether all values are numbers.
        whole: whether they are whole ones.
        flags: whether all values are 0 or 1, true or false.
        is_time: whether values are times, as types or in ISO 8601.
        least: of the numbers.
        greatest: of the numbers.
        total: of the numbers.
        separated: rows with a separator in their text, by separator.
        hashes: the smallest hashes of its values.
    """

    name: str
    type: str
    is_list: bool = False
    rows: int = 0
    values: int = 0
    missing: int = 0
    numeric: bool = True
    whole: bool = True
    flags: bool = True
    is_time: bool = False
    least: float = float("inf")
    greatest: float = float("-inf")
    total: float = 0.0
    separated: dict[str, int] = field(default_factory=dict)
    hashes: NDArray[np.uint64] = field(default_factory=lambda: np.zeros(0, np.uint64))

    @property
    def exact(self) -> bool:
        """Whether all distinct values were counted."""
        return len(self.hashes) < SKETCH

    @property
    def distinct(self) -> int:
        """How many distinct values there are, about."""
        if self.exact:
            return len(self.hashes)
        return round((SKETCH - 1) / (float(self.hashes[-1]) / 2.0**64))

    @property
    def missing_share(self) -> float:
        """Share of rows without a value."""
        return self.missing / max(self.rows, 1)

    @property
    def separator(self) -> str | None:
        """What stands between ids in texts, if anything does."""
        likely = {s: n for s, n in self.separated.items() if n >= 0.02 * max(self.rows, 1)}
        return max(likely, key=lambda s: likely[s]) if likely else None

    def add(self, column: pa.Array | pa.ChunkedArray) -> None:
        """Takes some more rows."""
        first = self.rows == 0
        self.rows += len(column)
        kind = kind_of(column.type)
        self.is_list = kind == "list"
        if self.is_list:
            values, lengths = bags_of(column, None)
            self.missing += int((lengths == 0).sum())
        else:
            values = column
        # Fractions are no ids, but they are values.
        is_float = kind_of(values.type) == "float"
        texts = texts_of(values.cast(pa.string()) if is_float else values, MISSING)
        present = ~texts.missing
        self.values += int(present.sum())
        if not self.is_list:
            self.missing += int(texts.missing.sum())
        hashes = np.unique(np.concatenate([self.hashes, keys_of(texts.values)[present]]))
        self.hashes = hashes[:SKETCH]
        self._add_numbers(values, kind)
        if kind == "time":
            self.is_time = True
        elif kind == "text" and not self.numeric and present.any():
            some = column.slice(0, 1000)
            times = times_of(some, TimestampOptions(column=self.name), MISSING)
            self.is_time = bool(times.ok.all()) and (first or self.is_time)
            for separator in SEPARATORS:
                has = pc.match_substring(texts.values, separator).fill_null(False)
                count = self.separated.get(separator, 0) + int(pc.sum(has).as_py() or 0)
                self.separated[separator] = count

    def _add_numbers(self, values: Any, kind: str) -> None:
        if not self.numeric:
            return
        numbers = numbers_of(values, MISSING)
        self.numeric = bool(numbers.ok.all()) and kind != "time"
        present = numbers.values[~numbers.missing]
        if self.flags:
            self.flags = bool(flags_of(values, MISSING).ok.all())
        if self.numeric and len(present):
            self.whole = self.whole and bool((np.floor(present) == present).all())
            self.least = min(self.least, float(present.min()))
            self.greatest = max(self.greatest, float(present.max()))
            self.total += float(present.sum())
        if not self.numeric:
            self.whole = False


def look_at(
    files: Sequence[TableFile], csv: CsvOptions, bad_lines: BadLines, progress: bool
) -> list[ColumnFacts]:
    """Returns what the columns of files hold; a column that is not in all files is left out.

    Raises:
        ValueError: a file cannot be read, or files have no column in common.
    """
    tables = [opened(file, csv) for file in files]
    common = [name for name in tables[0].schema if all(name in table.schema for table in tables)]
    usable = [name for name in common if kind_of(tables[0].schema[name]) != "other"]
    if not usable:
        raise ValueError(f"the files have no column in common that can be used: {files[0].path}")
    types = tables[0].schema
    facts = {name: ColumnFacts(name, _words(types[name])) for name in usable}
    sizes = [file.path.stat().st_size for file in files]
    with tqdm(
        total=sum(sizes), unit="B", unit_scale=True, desc="looking", disable=not progress
    ) as bar:
        for number, table in enumerate(tables):
            for rows in table.read(usable, 0, 1, bad_lines):
                for name in usable:
                    if len(rows.places):
                        facts[name].add(rows.columns[name])
                bar.n = sum(sizes[:number]) + rows.read
                bar.refresh()
    if not facts[usable[0]].rows:
        raise ValueError(f"no usable line in {', '.join(str(file.path) for file in files)}")
    return list(facts.values())


def _words(of_type: pa.DataType) -> str:
    return "text" if kind_of(of_type) == "text" else str(of_type)


@dataclass(frozen=True)
class Suggestion:
    """Says what samples could be made of columns.

    Attributes:
        label: column or expression.
        dense: columns of numbers.
        sparse: columns of ids.
        timestamp: column of times, if there is one.
        unit: what its numbers count; None if it has times.
        left_out: columns that are of no use, with the reason.
    """

    label: str
    dense: list[ColumnFacts]
    sparse: list[ColumnFacts]
    timestamp: ColumnFacts | None
    unit: str | None
    left_out: dict[str, str]


def suggest(facts: Sequence[ColumnFacts], label: str | None) -> Suggestion:
    """Suggests what to make of columns.

    Args:
        facts: of all columns.
        label: column or expression; None looks for one.

    Raises:
        ValueError: there is no label, or one that is not there, or no id.
    """
    by_name = {column.name: column for column in facts}
    label = label if label is not None else _label(facts)
    of_label = [label] if label in by_name else list(columns_of(parse_expression(label)))
    for name in of_label:
        if name not in by_name:
            raise ValueError(
                f"the label names column {name!r}, which is not there; there are "
                f"{', '.join(by_name)}"
            )
    timestamp, unit = _timestamp([column for column in facts if column.name not in of_label])
    left_out: dict[str, str] = {}
    dense, sparse = [], []
    for column in facts:
        if column.name in of_label or column is timestamp:
            continue
        reason = _useless(column)
        if reason is not None:
            left_out[column.name] = reason
        elif _is_dense(column):
            dense.append(column)
        else:
            sparse.append(column)
    if not sparse:
        raise ValueError(
            "no column looks like ids, and a model needs one at least; columns: "
            f"{', '.join(by_name)}"
        )
    return Suggestion(label, dense, sparse, timestamp, unit, left_out)


def _label(facts: Sequence[ColumnFacts]) -> str:
    flags = {c.name: c for c in facts if c.flags and not c.is_list and c.distinct == 2}
    named = [name for name in flags if name.lower() in LABELS]
    if len(named) == 1:
        return named[0]
    if len(flags) == 1:
        return next(iter(flags))
    what = f"{', '.join(flags)} have 0 and 1" if flags else "no column has just 0 and 1"
    raise ValueError(
        f"which column is the label? {what}: say --label COLUMN, or an expression such as --label "
        f"'rating >= 4'; columns: {', '.join(column.name for column in facts)}"
    )


def _timestamp(facts: Sequence[ColumnFacts]) -> tuple[ColumnFacts | None, str | None]:
    for column in facts:
        if column.is_time:
            return column, None
    for column in facts:
        if column.numeric and column.whole and column.values and TIME.search(column.name):
            for unit, (low, high) in UNITS.items():
                if low <= column.least and column.greatest < high:
                    return column, unit
    return None, None


def _useless(column: ColumnFacts) -> str | None:
    if not column.values:
        return "it has no value"
    if column.distinct < 2 and not column.missing:
        return "all its values are alike"
    many = column.rows >= FEW and not column.is_list and not (column.numeric and not column.whole)
    if many and column.distinct > ALL_DIFFER * column.rows:
        return "nearly every row has a value of its own"
    return None


def _is_dense(column: ColumnFacts) -> bool:
    if column.is_list or not column.numeric or IDENTIFIER.search(column.name):
        return False
    if not column.whole:
        return True
    # Numbers of things lie anywhere in their range, quantities crowd at its lower end.
    place = (column.total / max(column.values, 1) - column.least) / (column.greatest - column.least)
    return column.distinct > FEW and place < CROWDED
