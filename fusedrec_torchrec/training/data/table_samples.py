"""Rows of a file as samples: labels, numbers, and keys of categorical values."""

from collections.abc import Mapping
from datetime import UTC
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from fusedrec_torchrec.core.folder_files import shown
from fusedrec_torchrec.training.data.dense_transform import log_of
from fusedrec_torchrec.training.data.expression import Expression
from fusedrec_torchrec.training.data.file_names import LABEL, WEIGHTS
from fusedrec_torchrec.training.data.keys import keys_of
from fusedrec_torchrec.training.data.label import labels_of
from fusedrec_torchrec.training.data.table_columns import (
    Times,
    bags_of,
    numbers_of,
    part_of,
    texts_of,
    times_of,
)
from fusedrec_torchrec.training.data.table_options import SparseOptions, TableOptions

__all__ = ["TableSamples"]

Mask = NDArray[np.bool_]
AN_ID = "an id: a text, a whole number, a boolean or a time"


class TableSamples:
    """Makes samples of some rows.

    Args:
        columns: of the rows, by name.
        rows: how many there are.
        options: what to make of them.
        label: the expression of the label.
    """

    def __init__(
        self, columns: Mapping[str, Any], rows: int, options: TableOptions, label: Expression
    ) -> None:
        self._columns = dict(columns)
        self._rows = rows
        self._options = options
        self.problems: dict[int, tuple[str, str]] = {}
        """What is wrong with a row, as a kind and a text."""
        self._times = self._read_times()
        labels = labels_of(label, self._columns, options.missing, self._note)
        arrays = {LABEL: pa.array(labels.astype(np.int8))}
        arrays |= {name: self._dense(name) for name in options.dense}
        for name, feature in options.sparse.items():
            arrays |= self._bags(name, feature) if feature.bag else self._ids(name, feature)
        self._table = pa.table(arrays)
        self._late = self._after_start()

    @property
    def good(self) -> Mask:
        """Which rows nothing is wrong with."""
        good = np.ones(self._rows, dtype=np.bool_)
        good[list(self.problems)] = False
        return good

    @property
    def late(self) -> Mask | None:
        """Which of the good rows are held out by their time; None if time does not decide."""
        return None if self._late is None else self._late[self.good]

    @property
    def table(self) -> pa.Table:
        """The samples of the good rows."""
        return self._table if not self.problems else self._table.filter(pa.array(self.good))

    def _note(self, where: Mask, kind: str, column: str, must_be: str) -> None:
        """Notes rows whose value in a column is not what it must be."""
        for row in np.flatnonzero(where).tolist():
            if row not in self.problems:
                value = self._columns[column][row].as_py()
                value = value.decode(errors="replace") if isinstance(value, bytes) else value
                text = "missing" if value in (None, "") else shown(value)
                self.problems[row] = kind, f"column {column} is {text}, must be {must_be}"

    # -- times ---------------------------------------------------------------------------------

    def _read_times(self) -> Times | None:
        """Reads the timestamps, and adds the columns that are parts of them."""
        options = self._options.timestamp
        if options is None:
            return None
        times = times_of(self._columns[options.column], options, self._options.missing)
        how = f"of the format {options.format}" if options.format else "in ISO 8601"
        how = f"a number of {options.unit}" if options.unit else how
        self._note(~times.ok, "bad time", options.column, f"a time, {how}")
        unknown = times.missing | ~times.ok
        for name, part in self._options.times.items():
            self._columns[name] = pa.array(part_of(times.values, part), mask=unknown)
        return times

    def _after_start(self) -> Mask | None:
        if self._options.split.by != "time":
            return None
        assert self._times is not None and self._options.timestamp is not None
        column = self._options.timestamp.column
        self._note(self._times.missing, "bad time", column, "there, for the split by time")
        start = self._options.split.start_time().replace(tzinfo=UTC)
        return self._times.values >= round(start.timestamp() * 1_000_000)

    # -- dense ---------------------------------------------------------------------------------

    def _dense(self, name: str) -> pa.Array:
        numbers = numbers_of(self._columns[name], self._options.missing)
        self._note(~numbers.ok, "bad number", name, "a finite number")
        transform = self._options.transforms.get(name, self._options.transform)
        if transform == "standardize":
            return pa.array(numbers.values, mask=numbers.missing)
        values = log_of(numbers.values) if transform == "log" else numbers.values
        return pa.array(values.astype(np.float32))

    # -- sparse --------------------------------------------------------------------------------

    def _ids(self, name: str, feature: SparseOptions) -> dict[str, pa.Array]:
        column = feature.column or name
        texts = texts_of(self._columns[column], self._options.missing)
        self._note(~texts.ok, "bad id", column, AN_ID)
        return {name: pa.array(keys_of(texts.values), mask=texts.missing)}

    def _bags(self, name: str, feature: SparseOptions) -> dict[str, pa.Array]:
        """Returns lists of keys, and of weights if there are any; missing values are left out."""
        column = feature.column or name
        values, lengths = bags_of(self._columns[column], feature.separator)
        texts = texts_of(values, self._options.missing)
        row_of_id = np.repeat(np.arange(self._rows), lengths)
        self._note(
            _any(row_of_id, ~texts.ok, self._rows), "bad id", column, f"a list, each {AN_ID}"
        )
        keys, kept = keys_of(texts.values), ~texts.missing
        weights = None
        if feature.weights is not None:
            weights = self._weights(feature, column, lengths, row_of_id)
        kept_rows = row_of_id[kept]
        if feature.max_ids is not None:
            few = _place_in_bag(kept_rows) < feature.max_ids
            kept[np.flatnonzero(kept)[~few]] = False
            kept_rows = kept_rows[few]
        offsets = np.zeros(self._rows + 1, dtype=np.int32)
        offsets[1:] = np.cumsum(np.bincount(kept_rows, minlength=self._rows))
        arrays = {name: pa.ListArray.from_arrays(offsets, pa.array(keys[kept]))}
        if weights is not None:
            of_ids = pa.array(weights[kept].astype(np.float32))
            arrays[f"{name}{WEIGHTS}"] = pa.ListArray.from_arrays(offsets, of_ids)
        return arrays

    def _weights(
        self,
        feature: SparseOptions,
        column: str,
        lengths: NDArray[np.int64],
        row_of_id: NDArray[np.int64],
    ) -> NDArray[np.float64]:
        """Returns a weight for each id; ids of rows that have other numbers of them get 0."""
        assert feature.weights is not None
        values, own_lengths = bags_of(self._columns[feature.weights], feature.separator)
        numbers = numbers_of(values, self._options.missing)
        row_of_weight = np.repeat(np.arange(self._rows), own_lengths)
        differ = own_lengths != lengths
        for row in np.flatnonzero(differ).tolist():
            self.problems.setdefault(
                row,
                (
                    "wrong number of weights",
                    f"column {feature.weights} has {own_lengths[row]} weights, must be "
                    f"{lengths[row]}, one for each id of {column}",
                ),
            )
        bad = _any(row_of_weight, ~numbers.ok | numbers.missing, self._rows) & ~differ
        self._note(bad, "bad weight", feature.weights, "a list of finite numbers")
        weights = np.zeros(len(row_of_id), dtype=np.float64)
        weights[~differ[row_of_id]] = numbers.values[~differ[row_of_weight]]
        return weights


def _any(rows: NDArray[np.int64], where: Mask, count: int) -> Mask:
    """Returns which rows have a value for which something is true."""
    result = np.zeros(count, dtype=np.bool_)
    result[rows[where]] = True
    return result


def _place_in_bag(rows: NDArray[np.int64]) -> NDArray[np.int64]:
    """Returns the place of each value among those of its row; rows ascend."""
    firsts = np.searchsorted(rows, rows)
    return np.arange(len(rows)) - firsts
