"""Finds files with columns, and reads the columns block by block.

Parquet, Arrow and Feather files are read by ``pyarrow.dataset``.  Text is not: there, nobody could
tell the line of a malformed value, or go on in the middle of a file.  So text comes through
``lines``, as Criteo's does, and pyarrow splits its lines into values.
"""

import glob
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pyarrow as pa
import pyarrow.dataset as ds
from numpy.typing import NDArray

from fusedrec_torchrec.core.files import looked_for
from fusedrec_torchrec.training.data.bad_lines import BadLines
from fusedrec_torchrec.training.data.delimited import Dialect, read_texts, split_lines
from fusedrec_torchrec.training.data.lines import TextFile, in_natural_order
from fusedrec_torchrec.training.data.parquet import reading
from fusedrec_torchrec.training.data.table_options import CsvOptions, FileFormat

__all__ = ["ColumnFile", "Rows", "TableFile", "TextTable", "find_table_files", "is_there", "opened"]

FORMATS: dict[str, FileFormat] = {
    ".parquet": "parquet",
    ".pq": "parquet",
    ".csv": "csv",
    ".tsv": "csv",
    ".txt": "csv",
    ".data": "csv",
    ".arrow": "arrow",
    ".ipc": "arrow",
    ".feather": "feather",
}
PACKED = (".gz", ".zst", ".zstd")
READ_ROWS = 1 << 16  # of files that are no text
BYTE_ORDER_MARK = b"\xef\xbb\xbf"
REMEDY = "write the file anew, or leave it out of the files"


@dataclass(frozen=True)
class Rows:
    """Holds some rows of a file.

    Attributes:
        columns: the columns that were asked for.
        places: the line of each row in its text file, or its number, from 1.
        end: how far the file was read behind them, in bytes of text or in rows.
        line: number of the next line or row.
        read: bytes of the file that were read so far, for progress.
    """

    columns: pa.Table
    places: NDArray[np.int64]
    end: int
    line: int
    read: int


@dataclass(frozen=True)
class TableFile:
    """Is a file with columns, of a certain format."""

    path: Path
    format: FileFormat


def is_there(pattern: str) -> bool:
    """Returns whether a path or pattern names anything."""
    return Path(pattern).exists() or bool(glob.glob(pattern, recursive=True))


def find_table_files(
    patterns: Sequence[str | Path], of_format: FileFormat | None = None
) -> list[TableFile]:
    """Returns the files that paths and patterns name, those of folders one by one, in order.

    Raises:
        ValueError: nothing is named, a path does not exist, a pattern matches nothing, a file is
            empty or of a format that is not known.
    """
    if not patterns:
        raise ValueError("data.table.files is empty, must name files, folders or patterns")
    paths = [path for pattern in patterns for path in _paths(str(pattern), of_format)]
    files = [TableFile(path, of_format or _format_of(path)) for path in paths]
    for path in paths:
        if path.stat().st_size == 0:
            raise ValueError(f"data file {path} is empty")
        if paths.count(path) > 1:
            raise ValueError(f"data file {path} is named more than once")
    return files


def _paths(pattern: str, of_format: FileFormat | None) -> list[Path]:
    path = Path(pattern)
    if path.exists():
        return _files_of(path, of_format)
    if not glob.has_magic(pattern):
        raise ValueError(f"data file {path} does not exist{looked_for(path)}")
    matches = sorted(map(Path, glob.glob(pattern, recursive=True)), key=_place)
    if not matches:
        raise ValueError(f"pattern {pattern!r} matches no file{looked_for(path)}")
    return [file for match in matches for file in _files_of(match, of_format)]


def _files_of(path: Path, of_format: FileFormat | None) -> list[Path]:
    """Returns a file itself, or the data files of a folder."""
    if path.is_file():
        return [path]
    if not path.is_dir():
        raise ValueError(f"data file {path} is neither a file nor a folder of files")
    # Names that begin with a dot or an underscore are marks of those who write folders.
    inside = [p for p in path.rglob("*") if p.is_file() and p.name[0] not in "._"]
    inside = [p for p in inside if of_format is not None or _suffix(p) in FORMATS]
    if not inside:
        raise ValueError(f"folder {path} holds no data files ({', '.join(FORMATS)})")
    return sorted(inside, key=_place)


def _place(path: Path) -> tuple[str, list[tuple[int, str]]]:
    return str(path.parent), in_natural_order(path)


def _suffix(path: Path) -> str:
    suffixes = [suffix.lower() for suffix in path.suffixes]
    while suffixes and suffixes[-1] in PACKED:
        suffixes.pop()
    return suffixes[-1] if suffixes else ""


def _format_of(path: Path) -> FileFormat:
    suffix = _suffix(path)
    if suffix not in FORMATS:
        raise ValueError(
            f"data file {path} ends in {suffix or 'no suffix'!r}, must be one of "
            f"{', '.join(FORMATS)} ({', '.join(PACKED)} may follow), or say format: "
            f"{' | '.join(get_args(FileFormat))}"
        )
    return FORMATS[suffix]


def opened(file: TableFile, options: CsvOptions) -> "TextTable | ColumnFile":
    """Opens a file."""
    return TextTable(file.path, options) if file.format == "csv" else ColumnFile(file)


class TextTable:
    """Is a text file with columns.

    Args:
        path: of the file.
        options: what it looks like.
    """

    unit = ""

    def __init__(self, path: Path, options: CsvOptions) -> None:
        self.path = path
        self._options = options
        by_name = "\t" if _suffix(path) == ".tsv" else ","
        self._dialect = Dialect(options.delimiter or by_name, options.quote)

    @cached_property
    def schema(self) -> dict[str, pa.DataType]:
        """The columns and their types, which are texts.

        Raises:
            ValueError: the header cannot be read.
        """
        return dict.fromkeys(self._names, pa.binary())

    @cached_property
    def _names(self) -> list[str]:
        if self._options.columns:
            return list(self._options.columns)
        block = next(TextFile(self.path).blocks(), None)
        head = b"" if block is None else block.data.partition(b"\n")[0]
        head = head.removeprefix(BYTE_ORDER_MARK)
        line = split_lines(head + b"\n", self._dialect)
        if not head.strip() or not line.columns[0]:
            raise ValueError(
                f"{self.path}:1: there is no header; name the columns of a file without one by "
                "csv.columns"
            )
        numbered = [str(i) for i in range(int(line.columns[0]))]
        values = read_texts(line.data, numbered, self._dialect)
        names = [values[name][0].as_py().decode(errors="replace") for name in numbered]
        twice = [name for name in names if names.count(name) > 1]
        if twice:
            raise ValueError(f"{self.path}:1: the header has {twice[0]!r} more than once")
        return names

    def read(
        self, wanted: Sequence[str], start: int, line: int, bad_lines: BadLines
    ) -> Iterator[Rows]:
        """Yields rows from a position on; lines without the right number of values are left out."""
        names = self._names
        places = {name: str(names.index(name)) for name in wanted}
        for block in TextFile(self.path).blocks(start, line):
            behind = block.first_line + block.data.count(b"\n")
            if block.broken is not None:
                bad_lines.add(self.path, behind, "broken file", block.broken)
                continue  # its last line is cut off somewhere
            data = block.data.removeprefix(BYTE_ORDER_MARK if block.first_line == 1 else b"")
            lines = split_lines(data, self._dialect)
            kept = (lines.columns == len(names)) & ~lines.blank
            wrong = ~kept & ~lines.blank
            if block.first_line == 1 and not self._options.columns:
                kept[0] = wrong[0] = False  # the header
            for row in np.flatnonzero(wrong).tolist():
                kind, detail = self._problem(int(lines.columns[row]))
                bad_lines.add(self.path, block.first_line + row, kind, detail)
            numbers = block.first_line + np.flatnonzero(kept)
            columns = self._columns(lines.joined(kept), places)
            yield Rows(columns, numbers, block.end, behind, block.packed)

    def _columns(self, data: bytes, places: dict[str, str]) -> pa.Table:
        if not data:
            return pa.table({name: pa.array([], pa.binary()) for name in places})
        numbered = [str(i) for i in range(len(self._names))]
        values = read_texts(data, numbered, self._dialect, list(dict.fromkeys(places.values())))
        return pa.table({name: values[place] for name, place in places.items()})

    def _problem(self, columns: int) -> tuple[str, str]:
        if columns == 0:
            return (
                "bad quotes",
                f"a {self._dialect.quote} neither opens nor closes a value, or is not closed in "
                "its line (csv.quote: '' takes it as a character)",
            )
        return (
            "wrong number of columns",
            f"{columns} column{'s' if columns > 1 else ''}, must be {len(self._names)}: "
            f"{', '.join(self._names[:20])}{', ...' if len(self._names) > 20 else ''}",
        )


class ColumnFile:
    """Is a parquet, Arrow or Feather file.

    Args:
        file: with its format.
    """

    unit = "row "

    def __init__(self, file: TableFile) -> None:
        self.path = file.path
        self._format = file.format

    @cached_property
    def schema(self) -> dict[str, pa.DataType]:
        """The columns and their types.

        Raises:
            DamagedDataError: the file cannot be read.
        """
        with reading(self.path, REMEDY):
            schema = self._stream_schema() or self._fragment.physical_schema
        names = [field.name for field in schema]
        return {field.name: field.type for field in schema if names.count(field.name) == 1}

    @cached_property
    def _fragment(self) -> Any:
        how: Any = self._format if self._format != "arrow" else "ipc"
        if self._format == "parquet":
            # Pages are read as they are needed, not all of a row group at once.
            how = ds.ParquetFileFormat(
                default_fragment_scan_options=ds.ParquetFragmentScanOptions(
                    pre_buffer=False, use_buffered_stream=True
                )
            )
        (fragment,) = ds.dataset(str(self.path), format=how).get_fragments()
        return fragment

    def _stream_schema(self) -> pa.Schema | None:
        """Returns the schema of an Arrow stream, which is no file with an end; None if it is one.

        Hugging Face's datasets writes streams into files that end in .arrow.
        """
        if self._format == "parquet":
            return None
        with self.path.open("rb") as raw:
            if raw.read(6) == b"ARROW1":
                return None
            raw.seek(0)
            return pa.ipc.open_stream(raw).schema

    def read(
        self, wanted: Sequence[str], start: int, line: int, bad_lines: BadLines
    ) -> Iterator[Rows]:
        """Yields rows from a position on."""
        size = self.path.stat().st_size
        with reading(self.path, REMEDY):
            total = None if self._stream_schema() else self._fragment.count_rows()
        row = 0
        for batch, skipped in self._batches(list(wanted), start):
            row += skipped
            if row + batch.num_rows <= start:
                row += batch.num_rows
                continue
            if row < start:
                batch, row = batch.slice(start - row), start
            places = row + 1 + np.arange(batch.num_rows)
            row += batch.num_rows
            read = 0 if total is None else size * row // max(total, 1)
            yield Rows(pa.Table.from_batches([batch]), places, row, row + 1, read)

    def _batches(self, wanted: list[str], start: int) -> Iterator[tuple[pa.RecordBatch, int]]:
        """Yields batches, each with the rows before it that were passed over."""
        with reading(self.path, REMEDY):
            if self._stream_schema() is not None:
                with self.path.open("rb") as raw:
                    for batch in pa.ipc.open_stream(raw):
                        yield from _pieces(batch.select(wanted), 0)
                return
            skipped = row = 0
            for fragment in self._parts():
                if self._format == "parquet":
                    rows = sum(group.num_rows for group in fragment.row_groups)
                    if row + rows <= start:
                        row, skipped = row + rows, skipped + rows
                        continue
                    row += rows
                for batch in fragment.to_batches(
                    columns=wanted, batch_size=READ_ROWS, use_threads=False, batch_readahead=1
                ):
                    if batch.num_rows:
                        yield from _pieces(batch, skipped)
                        skipped = 0

    def _parts(self) -> list[Any]:
        """Returns what can be read alone, in order."""
        return (
            list(self._fragment.split_by_row_group())
            if self._format == "parquet"
            else [self._fragment]
        )


def _pieces(batch: pa.RecordBatch, skipped: int) -> Iterator[tuple[pa.RecordBatch, int]]:
    """Yields a batch in pieces that are not too long; Arrow files may have batches of any size."""
    for start in range(0, batch.num_rows, READ_ROWS):
        yield batch.slice(start, READ_ROWS), skipped
        skipped = 0
