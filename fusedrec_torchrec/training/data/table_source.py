"""Files with columns of the user's own as a source of samples."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from fusedrec_torchrec.access.synthetic import random_bits
from fusedrec_torchrec.core.config import to_mapping
from fusedrec_torchrec.training.data.bad_lines import BadLines
from fusedrec_torchrec.training.data.expression import (
    Column,
    Expression,
    columns_of,
    parse_expression,
)
from fusedrec_torchrec.training.data.raw_source import (
    Feature,
    Layout,
    Position,
    RawSamples,
    TableRule,
)
from fusedrec_torchrec.training.data.table_columns import kind_of
from fusedrec_torchrec.training.data.table_files import (
    ColumnFile,
    Rows,
    TableFile,
    TextTable,
    find_table_files,
    opened,
)
from fusedrec_torchrec.training.data.table_options import RowsOptions, TableOptions
from fusedrec_torchrec.training.data.table_samples import TableSamples

__all__ = ["TableSource", "options_of"]

# What the result does not depend on, or what is told from other data by the files themselves.
NOT_OPTIONS = ("files", "prepared", "on_bad_line", "memory_mb")
SPLIT_SEED = 0
SCALAR = ("text", "integer", "float", "decimal", "boolean", "time", "nothing")


def options_of(options: TableOptions) -> dict[str, Any]:
    """Returns the options that the prepared data depends on, as plain data."""
    mapping = {key: value for key, value in to_mapping(options).items() if key not in NOT_OPTIONS}
    split = dict(mapping["split"])
    if options.split.start is not None:
        split["start"] = options.split.start_time().isoformat()
    split["files"] = [Path(file).name for file in options.split.files]
    return {**mapping, "split": split}


class TableSource:
    """Is a ``RawSource`` of files with columns.

    Args:
        files: the files, in order.
        options: how samples are made of their columns.

    Raises:
        ValueError: a column is not there or cannot be used, the label is no expression, or the
            files that are held out are not among the files.
    """

    def __init__(self, files: Sequence[TableFile], options: TableOptions) -> None:
        self._opened = [opened(file, options.csv) for file in files]
        self._settings = options
        self._label = self._parsed_label()
        self._wanted = self._check_columns()
        self._held_out = self._held_out_files()
        self.splits = options.split.by != "end"
        self.options = options_of(options)
        transforms = {
            name: options.transforms.get(name, options.transform) for name in options.dense
        }
        features = [
            Feature(name, f.table or name, f.bag, f.weights is not None)
            for name, f in options.sparse.items()
        ]
        self.layout = Layout(
            dense=options.dense,
            features=features,
            tables={feature.table: self._rule(feature.table) for feature in features},
            standardized=[name for name, kind in transforms.items() if kind == "standardize"],
            value_type=np.uint64,
        )

    @property
    def files(self) -> Sequence[Path]:
        """The files, in order."""
        return [file.path for file in self._opened]

    def read(self, position: Position, bad_lines: BadLines) -> Iterator[RawSamples]:
        """Yields samples from a position on, malformed rows left out and noted."""
        before = [0, *np.cumsum([path.stat().st_size for path in self.files]).tolist()]
        for number in range(position.file, len(self._opened)):
            place = position if number == position.file else Position(number)
            file = self._opened[number]
            for rows in file.read(self._wanted, place.end, place.line, bad_lines):
                columns, held_out = self._samples(rows, number, bad_lines)
                behind = Position(number, rows.end, rows.line)
                yield RawSamples(columns, behind, before[number] + rows.read, held_out)

    def _samples(
        self, rows: Rows, number: int, bad_lines: BadLines
    ) -> tuple[pa.Table, NDArray[np.bool_] | None]:
        """Returns samples, and which of them are held out."""
        file, count = self._opened[number], len(rows.places)
        columns = {name: rows.columns[name] for name in rows.columns.column_names}
        samples = TableSamples(columns, count, self._settings, self._label)
        for row, (kind, detail) in sorted(samples.problems.items()):
            bad_lines.add(file.path, f"{file.unit}{rows.places[row]}", kind, detail)
        places = rows.places[samples.good]
        by = self._settings.split.by
        held_out = samples.late
        if by == "file":
            held_out = np.full(len(places), file.path.resolve() in self._held_out)
        elif by == "random":
            assert self._settings.split.share is not None
            bits = random_bits(SPLIT_SEED, number + 1, places)
            held_out = bits < np.uint64(self._settings.split.share * 2.0**64)
        return samples.table, held_out

    def _rule(self, table: str) -> TableRule:
        options, own = self._settings, self._settings.tables.get(table, RowsOptions())
        return TableRule(
            min_count=own.min_count or options.min_count,
            max_rows=own.max_rows or options.max_rows,
            hash_rows=own.hash_rows,
        )

    def _parsed_label(self) -> Expression:
        text = self._settings.label
        there = self._opened[0].schema
        if text in there:
            return Column(text)
        try:
            return parse_expression(text)
        except ValueError as error:
            raise ValueError(
                f"data.table.label is neither a column nor an expression: {error}. Columns of "
                f"{self._opened[0].path}: {', '.join(there)}"
            ) from None

    def _held_out_files(self) -> set[Path]:
        if self._settings.split.by != "file":
            return set()
        files = {path.resolve() for path in self.files}
        try:
            chosen = find_table_files(self._settings.split.files, self._settings.format)
        except ValueError as error:
            raise ValueError(f"data.table.split.files: {error}") from None
        for file in chosen:
            if file.path.resolve() not in files:
                raise ValueError(
                    f"data.table.split.files names {file.path}, which is none of the files; there "
                    f"are {', '.join(str(path) for path in self.files[:10])}"
                )
        return {file.path.resolve() for file in chosen}

    # -- columns -------------------------------------------------------------------------------

    def _check_columns(self) -> list[str]:
        """Checks the columns of all files; returns those that are needed."""
        settings = self._settings
        uses: list[tuple[str, str, tuple[str, ...], str]] = [
            ("label", name, SCALAR, "a number, a text or a boolean")
            for name in columns_of(self._label)
        ]
        uses += [
            ("dense", name, SCALAR, "a number, a boolean, a time or text with numbers")
            for name in settings.dense
        ]
        if settings.timestamp is not None:
            uses.append(("timestamp", settings.timestamp.column, SCALAR, "a time, number or text"))
        for name, feature in settings.sparse.items():
            where, column = f"sparse.{name}", feature.column or name
            if feature.bag:
                kinds = ("text", "nothing") if feature.separator else ("list", "nothing")
                must = (
                    "text, of which separator makes lists"
                    if feature.separator
                    else "a list, or text with a separator (sparse.*.separator)"
                )
                uses.append((where, column, kinds, must))
                if feature.weights is not None:
                    uses.append((f"{where}.weights", feature.weights, kinds, must))
            else:
                must = f"a single id: {', '.join(SCALAR[:-1])}; for lists write bag: true"
                uses.append((where, column, SCALAR, must))
        for file in self._opened:
            for name in settings.times:
                if name in file.schema:
                    raise ValueError(
                        f"data.table.times has {name!r}, which is a column of {file.path} already, "
                        "must have another name"
                    )
            for use in uses:
                if use[1] not in settings.times:
                    _check_column(file, *use)
        self._check_time()
        names = dict.fromkeys(column for _, column, _, _ in uses)
        return [name for name in names if name not in settings.times]

    def _check_time(self) -> None:
        options = self._settings.timestamp
        for file in self._opened if options is not None else []:
            assert options is not None
            kind = kind_of(file.schema[options.column])
            if kind in ("integer", "float", "decimal") and not (options.unit or options.format):
                raise ValueError(
                    f"data.table.timestamp.unit is missing: column {options.column!r} of "
                    f"{file.path} is {file.schema[options.column]}, must say whether it counts s, "
                    "ms, us or ns"
                )


def _check_column(
    file: TextTable | ColumnFile, where: str, column: str, kinds: tuple[str, ...], must: str
) -> None:
    if column not in file.schema:
        raise ValueError(
            f"data.table.{where} names column {column!r}, which {file.path} does not have; there "
            f"are {', '.join(file.schema)}"
        )
    own = file.schema[column]
    kind = kind_of(own)
    inside = kind_of(own.value_type) if kind == "list" else None
    if kind not in kinds or (inside is not None and inside not in SCALAR):
        raise ValueError(
            f"data.table.{where}: column {column!r} of {file.path} is {own}, must be {must}"
        )
