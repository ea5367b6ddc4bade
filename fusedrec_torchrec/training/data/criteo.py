"""Reads Criteo's text format: label, 13 integers, 26 categories in hexadecimal, and tabs.

The Kaggle file (train.txt) and the Terabyte days (day_0 to day_23) share it.  Names of the columns
are those of ``torchrec.datasets.criteo``.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from fusedrec_torchrec.training.data.bad_lines import BadLines
from fusedrec_torchrec.training.data.delimited import Dialect, read_texts, split_lines
from fusedrec_torchrec.training.data.file_names import LABEL
from fusedrec_torchrec.training.data.lines import Block, TextFile

__all__ = ["CATEGORIES", "INTEGERS", "LABEL", "RawColumns", "parse", "read"]

# The names that torchrec.datasets.criteo gives to the columns, without the import of TorchRec.
INTEGERS = [f"int_{i}" for i in range(13)]
CATEGORIES = [f"cat_{i}" for i in range(26)]
COLUMNS = [LABEL, *INTEGERS, *CATEGORIES]
TABS = Dialect("\t", "")

# The value of a hexadecimal digit, 255 for all other bytes.
DIGITS = np.full(256, 255, dtype=np.uint8)
for _value, _digit in enumerate("0123456789abcdef"):
    DIGITS[[ord(_digit), ord(_digit.upper())]] = _value
PLACES = np.array([16**i for i in range(7, -1, -1)], dtype=np.uint32)


@dataclass(frozen=True)
class RawColumns:
    """Lines of text as columns of numbers.

    Attributes:
        labels: [n] 0 or 1.
        integers: [n, 13], 0 where missing.
        missing_integers: [n, 13].
        categories: [n, 26], 0 where missing.
        missing_categories: [n, 26].
    """

    labels: NDArray[np.int8]
    integers: NDArray[np.int64]
    missing_integers: NDArray[np.bool_]
    categories: NDArray[np.uint32]
    missing_categories: NDArray[np.bool_]

    def __len__(self) -> int:
        return len(self.labels)

    @classmethod
    def nothing(cls) -> "RawColumns":
        """Returns the columns of no lines."""
        integers, categories = (0, len(INTEGERS)), (0, len(CATEGORIES))
        return cls(
            np.zeros(0, dtype=np.int8),
            np.zeros(integers, dtype=np.int64),
            np.zeros(integers, dtype=np.bool_),
            np.zeros(categories, dtype=np.uint32),
            np.zeros(categories, dtype=np.bool_),
        )


def read(
    file: TextFile,
    bad_lines: BadLines,
    start: int = 0,
    first_line: int = 1,
) -> Iterator[tuple[RawColumns, Block]]:
    """Yields a file's lines in blocks, malformed ones left out and noted in ``bad_lines``."""
    for block in file.blocks(start, first_line):
        if block.broken is not None:
            lines = block.first_line + block.data.count(b"\n")
            bad_lines.add(file.path, lines, "broken file", block.broken)
            continue  # its last line is cut off somewhere
        yield parse(block, lambda *bad: bad_lines.add(file.path, *bad)), block


def parse(block: Block, bad: Callable[[int, str, str], None]) -> RawColumns:
    """Returns the columns of a block; ``bad(line, kind, detail)`` hears of each line left out."""
    lines = split_lines(block.data, TABS)
    good = lines.columns == len(COLUMNS)
    # pyarrow would stumble over some of the others.
    wrong = {
        int(i): ("wrong number of columns", _wrong_number(int(lines.columns[i])))
        for i in np.flatnonzero(~good)
    }
    data, kept = lines.joined(good), np.flatnonzero(good)
    if not data:
        _report(block, wrong, bad)
        return RawColumns.nothing()
    table = read_texts(data, COLUMNS, TABS)
    assert len(kept) == table.num_rows, (len(kept), table.num_rows)

    strict = b"x" in data or b"X" in data  # Arrow takes 0x1F for an integer
    labels, label_ok = _labels(table[LABEL])
    integers = [_integers(table[name], strict) for name in INTEGERS]
    categories = [_hexadecimals(table[name]) for name in CATEGORIES]
    good = label_ok
    for name, ok in [
        (LABEL, label_ok),
        *((name, ok) for name, (_, _, ok) in zip(INTEGERS, integers, strict=True)),
        *((name, ok) for name, (_, _, ok) in zip(CATEGORIES, categories, strict=True)),
    ]:
        for row in np.flatnonzero(~ok).tolist():
            wrong.setdefault(kept[row].item(), _reason(name, table[name][row].as_py()))
        good = good & ok
    _report(block, wrong, bad)
    return RawColumns(
        labels=labels[good],
        integers=np.stack([values for values, _, _ in integers], axis=1)[good],
        missing_integers=np.stack([missing for _, missing, _ in integers], axis=1)[good],
        categories=np.stack([values for values, _, _ in categories], axis=1)[good],
        missing_categories=np.stack([missing for _, missing, _ in categories], axis=1)[good],
    )


def _report(
    block: Block, wrong: dict[int, tuple[str, str]], bad: Callable[[int, str, str], None]
) -> None:
    for row, (kind, detail) in sorted(wrong.items()):
        bad(block.first_line + row, kind, detail)


def _wrong_number(columns: int) -> str:
    return (
        f"{columns} column{'s' if columns > 1 else ''}, must be {len(COLUMNS)} as in Criteo's "
        f"format: label, {len(INTEGERS)} integers, {len(CATEGORIES)} hexadecimal categories, "
        "separated by tabs"
    )


def _reason(column: str, value: bytes) -> tuple[str, str]:
    shown = value[:40].decode(errors="replace")
    if column == LABEL:
        return "bad label", f"label is {shown!r}, must be 0 or 1"
    if column in INTEGERS:
        return "bad integer", f"column {column} is {shown!r}, must be an integer or empty"
    return "bad hex", f"column {column} is {shown!r}, must be 1 to 8 hexadecimal digits or empty"


def _labels(column: pa.ChunkedArray) -> tuple[NDArray[np.int8], NDArray[np.bool_]]:
    ones = _numpy(pc.equal(column, b"1"))
    return ones.astype(np.int8), ones | _numpy(pc.equal(column, b"0"))


def _integers(
    column: pa.ChunkedArray, strict: bool
) -> tuple[NDArray[np.int64], NDArray[np.bool_], NDArray[np.bool_]]:
    """Returns values, where they are missing, and where they are well-formed."""
    missing = pc.equal(column, b"")
    filled = pc.if_else(missing, b"0", column).cast(pa.string(), safe=False)
    try:
        if not strict:
            return _numpy(filled.cast(pa.int64())), _numpy(missing), np.full(len(column), True)
    except pa.ArrowInvalid:
        pass
    ok = pc.match_substring_regex(filled.cast(pa.binary()), r"^-?[0-9]{1,18}$")
    values = pc.if_else(ok, filled, "0").cast(pa.int64())
    return _numpy(values), _numpy(missing), _numpy(ok)


def _hexadecimals(
    column: pa.ChunkedArray,
) -> tuple[NDArray[np.uint32], NDArray[np.bool_], NDArray[np.bool_]]:
    """Returns values, where they are missing, and where they are well-formed."""
    array = column.combine_chunks()
    if isinstance(array, pa.ChunkedArray):
        array = pa.concat_arrays(array.chunks)
    lengths = _numpy(pc.binary_length(array))
    n = len(array)
    if n == 0:
        none = np.zeros(0, dtype=np.bool_)
        return np.zeros(0, dtype=np.uint32), none, none
    offsets = np.frombuffer(array.buffers()[1], dtype=np.int32)[array.offset : array.offset + n + 1]
    data = np.frombuffer(array.buffers()[2] or b"\0", dtype=np.uint8)
    # Digit i of 8, right-aligned; places before a shorter value count as 0.
    places = np.arange(8) - (8 - lengths[:, None])
    digits = DIGITS[data[np.clip(offsets[:-1, None] + places, 0, len(data) - 1)]]
    digits[places < 0] = 0
    ok = (lengths <= 8) & (digits < 16).all(axis=1)
    values = (np.where(digits < 16, digits, 0).astype(np.uint32) * PLACES).sum(
        axis=1, dtype=np.uint32
    )
    return np.where(ok, values, 0).astype(np.uint32), lengths == 0, ok


def _numpy(array: pa.Array | pa.ChunkedArray) -> NDArray[Any]:
    if isinstance(array, pa.ChunkedArray):
        array = array.combine_chunks()
    return array.to_numpy(zero_copy_only=False)
