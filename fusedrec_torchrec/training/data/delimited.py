"""Reads lines of values with delimiters between them as columns of text.

A value may stand between quotes, with quotes in it doubled (RFC 4180); a line end in it is not
supported, so a record is a line, and what is wrong with one can be named by its number.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from pyarrow import csv

__all__ = ["Dialect", "Lines", "read_texts", "split_lines"]

LONE_RETURN = re.compile(rb"\r(?!\n)")
NEWLINE, RETURN = ord("\n"), ord("\r")


@dataclass(frozen=True)
class Dialect:
    """Says what stands between values, and around them.

    Attributes:
        delimiter: one character.
        quote: one character; empty if values are never quoted.
    """

    delimiter: str = ","
    quote: str = '"'


@dataclass(frozen=True)
class Lines:
    """Holds lines of text.

    Attributes:
        data: the lines, each with its end.
        starts: where each of them begins.
        ends: where its line end is.
        columns: how many values it has; 0 if its quotes do not open and close values.
    """

    data: bytes
    starts: NDArray[np.int64]
    ends: NDArray[np.int64]
    columns: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.starts)

    @property
    def blank(self) -> NDArray[np.bool_]:
        """Whether there is nothing in a line."""
        characters = np.frombuffer(self.data, dtype=np.uint8)
        length = self.ends - self.starts
        return (length == 0) | ((length == 1) & (characters[self.starts] == RETURN))

    def joined(self, kept: NDArray[np.bool_]) -> bytes:
        """Returns some of the lines, one after another."""
        if kept.all():
            return self.data
        places = np.flatnonzero(kept).tolist()
        return b"".join(self.data[self.starts[i] : self.ends[i] + 1] for i in places)


def split_lines(data: bytes, dialect: Dialect) -> Lines:
    """Finds lines and the number of values in each of them."""
    if not data.endswith(b"\n"):
        data += b"\n"
    if b"\r" in data:  # alone it would end a line for pyarrow, but not for us
        data = LONE_RETURN.sub(b"\0", data)
    characters = np.frombuffer(data, dtype=np.uint8)
    ends = np.flatnonzero(characters == NEWLINE)
    starts = np.concatenate([[0], ends[:-1] + 1])
    delimiters = np.flatnonzero(characters == ord(dialect.delimiter))
    if not dialect.quote or dialect.quote.encode() not in data:
        columns = np.diff(np.searchsorted(delimiters, ends), prepend=0) + 1
        return Lines(data, starts, ends, columns)
    quotes = np.flatnonzero(characters == ord(dialect.quote))
    before = np.searchsorted(quotes, starts)  # quotes before each line
    line = np.searchsorted(ends, delimiters)
    outside = (np.searchsorted(quotes, delimiters) - before[line]) % 2 == 0
    columns = np.bincount(line[outside], minlength=len(ends)) + 1
    columns[_badly_quoted(characters, quotes, ends, before, dialect)] = 0
    return Lines(data, starts, ends, columns)


def _badly_quoted(
    characters: NDArray[np.uint8],
    quotes: NDArray[np.int64],
    ends: NDArray[np.int64],
    before: NDArray[np.int64],
    dialect: Dialect,
) -> NDArray[np.int64]:
    """Returns the lines with a quote that neither opens nor closes a value nor is doubled."""
    line = np.searchsorted(ends, quotes)
    opens = (np.arange(len(quotes)) - before[line]) % 2 == 0
    previous = np.where(quotes > 0, characters[quotes - 1], NEWLINE)
    following = characters[quotes + 1]  # there is a line end behind the last one
    quote, delimiter = ord(dialect.quote), ord(dialect.delimiter)
    good_opening = np.isin(previous, [delimiter, NEWLINE, quote])
    good_closing = np.isin(following, [delimiter, NEWLINE, RETURN, quote])
    wrong = line[np.where(opens, ~good_opening, ~good_closing)]
    in_line = np.diff(np.append(before, len(quotes)))
    return np.union1d(wrong, np.flatnonzero(in_line % 2))


def read_texts(
    data: bytes, names: Sequence[str], dialect: Dialect, wanted: Sequence[str] = ()
) -> pa.Table:
    """Returns the columns of lines that all have as many values as there are names.

    Args:
        data: the lines.
        names: of all columns.
        dialect: what stands between values.
        wanted: those of them to return; all if empty.
    """
    return csv.read_csv(
        pa.BufferReader(data),
        read_options=csv.ReadOptions(
            use_threads=False, column_names=list(names), block_size=len(data) + 64
        ),
        parse_options=csv.ParseOptions(
            delimiter=dialect.delimiter,
            quote_char=dialect.quote or False,
            ignore_empty_lines=False,
        ),
        convert_options=csv.ConvertOptions(
            column_types=dict.fromkeys(names, pa.binary()),
            strings_can_be_null=False,
            include_columns=list(wanted),
        ),
    ).combine_chunks()
