"""Columns of any type as what samples are made of: texts, numbers, flags, times and bags.

Text files have texts only, other files have types; both come out the same.  Every function also
says where a value is missing, and where it cannot be what is asked for.
"""

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any, Literal, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from fusedrec_torchrec.training.data.table_options import (
    UNIT_SECONDS,
    TimePart,
    TimestampOptions,
)

__all__ = [
    "Bags",
    "Flags",
    "Kind",
    "Numbers",
    "Texts",
    "Times",
    "bags_of",
    "flags_of",
    "kind_of",
    "numbers_of",
    "part_of",
    "texts_of",
    "times_of",
]

Kind = Literal["text", "integer", "float", "decimal", "boolean", "time", "list", "nothing", "other"]
Mask = NDArray[np.bool_]

TRUE, FALSE = ("1", "true", "t", "yes", "1.0"), ("0", "false", "f", "no", "0.0")
LARGEST_WHOLE = 2.0**53


class Texts(NamedTuple):
    """Holds values as texts; ``ok`` is false where a value cannot be an id."""

    values: pa.LargeBinaryArray
    missing: Mask
    ok: Mask


class Numbers(NamedTuple):
    """Holds values as numbers, 0 where they are missing or none."""

    values: NDArray[np.float64]
    missing: Mask
    ok: Mask


class Flags(NamedTuple):
    """Holds values as true or false."""

    values: Mask
    missing: Mask
    ok: Mask


class Times(NamedTuple):
    """Holds values as microseconds since 1970, by the clock of the place."""

    values: NDArray[np.int64]
    missing: Mask
    ok: Mask


class Bags(NamedTuple):
    """Holds lists: their values one after another, and how many each list has."""

    values: pa.Array
    lengths: NDArray[np.int64]


def kind_of(of_type: pa.DataType) -> Kind:
    """Returns what the values of a type are; a dictionary is what its values are."""
    kinds = pa.types
    if kinds.is_dictionary(of_type):
        return kind_of(of_type.value_type)
    if kinds.is_list(of_type) or kinds.is_large_list(of_type) or kinds.is_fixed_size_list(of_type):
        return "list"
    tests: dict[Kind, tuple[Any, ...]] = {
        "nothing": (kinds.is_null,),
        "boolean": (kinds.is_boolean,),
        "integer": (kinds.is_integer,),
        "float": (kinds.is_floating,),
        "decimal": (kinds.is_decimal,),
        "time": (kinds.is_timestamp, kinds.is_date),
        "text": (
            *(kinds.is_string, kinds.is_large_string, kinds.is_binary, kinds.is_large_binary),
            kinds.is_fixed_size_binary,
        ),
    }
    return next(
        (kind for kind, are in tests.items() if any(is_it(of_type) for is_it in are)), "other"
    )


def _plain(column: pa.Array | pa.ChunkedArray) -> pa.Array:
    """Returns a column as one array, without a dictionary."""
    if isinstance(column, pa.ChunkedArray):
        chunks = column.chunks
        column = pa.concat_arrays(chunks) if chunks else pa.array([], column.type)
    return column.dictionary_decode() if pa.types.is_dictionary(column.type) else column


def _numpy(array: pa.Array) -> NDArray[Any]:
    return array.to_numpy(zero_copy_only=False)


def texts_of(column: pa.Array | pa.ChunkedArray, missing_words: Sequence[str]) -> Texts:
    """Returns the values of a column as texts: 7 is the same as ``"7"``.

    Numbers with a fraction are none: pandas makes 7.0 of 7 in a column with missing values, but
    7.5 is no id.
    """
    column = _plain(column)
    kind = kind_of(column.type)
    ok = np.ones(len(column), dtype=np.bool_)
    if kind == "float":
        values = _numpy(column.cast(pa.float64()).fill_null(float("nan")))
        absent = np.isnan(values)
        with np.errstate(invalid="ignore"):
            ok = absent | ((np.floor(values) == values) & (np.abs(values) <= LARGEST_WHOLE))
        whole = np.where(ok & ~absent, values, 0).astype(np.int64)
        column = pa.array(whole, mask=absent)
    if kind != "text":
        column = column.cast(pa.string())
    texts = column.cast(pa.large_binary())
    missing = _numpy(texts.is_null())
    if missing_words:
        words = pa.array([word.encode() for word in missing_words], pa.large_binary())
        missing = missing | _numpy(pc.is_in(texts, value_set=words))
    return Texts(texts, missing, ok)


def numbers_of(column: pa.Array | pa.ChunkedArray, missing_words: Sequence[str]) -> Numbers:
    """Returns the values of a column as numbers; NaN is a missing one, times are seconds."""
    column = _plain(column)
    kind = kind_of(column.type)
    if kind == "text":
        texts = texts_of(column, missing_words)
        values = _parsed(texts.values, texts.missing)
        missing, ok = texts.missing, ~np.isnan(values) | texts.missing
        # The text "nan" is what pandas writes for a missing number.
        is_nan = np.isnan(values) & ~missing
        if is_nan.any():
            spelled = pc.is_in(texts.values, value_set=pa.array(NAN_WORDS, pa.large_binary()))
            missing = missing | _numpy(spelled)
            ok = ok | missing
    else:
        if kind == "time":
            micros = _numpy(
                column.cast(pa.timestamp("us"), safe=False).cast(pa.int64()).fill_null(0)
            )
            values = micros / 1e6
            missing = _numpy(column.is_null())
        else:
            values = _numpy(column.cast(pa.float64(), safe=False).fill_null(float("nan")))
            missing = np.isnan(values)
        ok = np.ones(len(column), dtype=np.bool_)
    ok = ok & (missing | np.isfinite(values))
    return Numbers(np.where(ok & ~missing, values, 0.0), missing, ok)


NAN_WORDS = [word.encode() for word in ("nan", "NaN", "NAN", "-nan")]


def _parsed(texts: pa.LargeBinaryArray, missing: Mask) -> NDArray[np.float64]:
    """Returns the numbers that texts are; NaN where a text is none."""
    filled = pc.if_else(pa.array(~missing), texts, pa.scalar(b"0", pa.large_binary()))
    try:
        return _numpy(filled.cast(pa.large_string(), safe=False).cast(pa.float64()))
    except pa.ArrowInvalid:  # one of them is none: one by one
        return np.array([_float(text) for text in filled.to_pylist()], dtype=np.float64)


def _float(text: bytes) -> float:
    try:
        return float("nan") if b"_" in text else float(text)
    except ValueError:
        return float("nan")


def flags_of(column: pa.Array | pa.ChunkedArray, missing_words: Sequence[str]) -> Flags:
    """Returns the values of a column as true or false: 1 and 0, true and false, yes and no."""
    column = _plain(column)
    if kind_of(column.type) in ("integer", "float", "decimal", "boolean"):
        numbers = numbers_of(column, missing_words)
        ok = numbers.ok & ((numbers.values == 0) | (numbers.values == 1))
        return Flags(numbers.values == 1, numbers.missing, ok)
    texts = texts_of(column, missing_words)
    distinct = texts.values.dictionary_encode()
    words = [b"" if word is None else word for word in distinct.dictionary.to_pylist()]
    lower = [word.decode(errors="replace").strip().lower() for word in words]
    codes = _numpy(distinct.indices.fill_null(-1))
    true = np.array([*(word in TRUE for word in lower), False], dtype=np.bool_)
    false = np.array([*(word in FALSE for word in lower), False], dtype=np.bool_)
    return Flags(true[codes], texts.missing, true[codes] | false[codes] | texts.missing)


def times_of(
    column: pa.Array | pa.ChunkedArray, options: TimestampOptions, missing_words: Sequence[str]
) -> Times:
    """Returns the values of a column as times."""
    column = _plain(column)
    offset = round(options.utc_offset * 3_600_000_000)
    if kind_of(column.type) == "time":
        micros = column.cast(pa.timestamp("us"), safe=False).cast(pa.int64())
        values, missing = _numpy(micros.fill_null(0)), _numpy(column.is_null())
        return Times(values + offset, missing, np.ones(len(column), dtype=np.bool_))
    if options.unit is not None:
        numbers = numbers_of(column, missing_words)
        scaled = np.rint(numbers.values * (UNIT_SECONDS[options.unit] * 1e6))
        ok = numbers.ok & (np.abs(scaled) < 2.0**62)
        return Times(np.where(ok, scaled, 0).astype(np.int64) + offset, numbers.missing, ok)
    texts = texts_of(column, missing_words)
    empty = pa.scalar(None, pa.large_binary())
    words = pc.if_else(pa.array(~texts.missing), texts.values, empty)
    words = words.cast(pa.string(), safe=False)
    if options.format is not None:
        parsed = pc.strptime(words, format=options.format, unit="s", error_is_null=True)
        parsed = parsed.cast(pa.timestamp("us"))
    else:
        parsed = _iso(words)
    ok = _numpy(parsed.is_valid()) | texts.missing
    values = _numpy(parsed.cast(pa.int64()).fill_null(0))
    return Times(values + offset, texts.missing, ok)


def _iso(words: pa.StringArray) -> pa.TimestampArray:
    """Returns the times that texts are; null where a text is none."""
    try:
        return words.cast(pa.timestamp("us"))
    except pa.ArrowInvalid:
        times = [None if word is None else _moment(word) for word in words.to_pylist()]
        return pa.array(times, pa.int64()).cast(pa.timestamp("us"))


def _moment(text: str) -> int | None:
    try:
        moment = datetime.fromisoformat(text.strip())
    except ValueError:
        return None
    moment = moment.replace(tzinfo=UTC) if moment.tzinfo is None else moment
    since = moment - datetime(1970, 1, 1, tzinfo=UTC)
    return (since.days * 86_400 + since.seconds) * 1_000_000 + since.microseconds


def part_of(times: NDArray[np.int64], part: TimePart) -> NDArray[Any]:
    """Returns a part of each time, such as the hour; Monday is weekday 0."""
    seconds = times // 1_000_000
    days = seconds // 86_400
    if part == "time_of_day":  # a share of the day
        return (times - days * 86_400_000_000) / 86_400_000_000
    if part in ("day", "month", "year"):
        dates = days.astype("datetime64[D]")
        months, years = dates.astype("datetime64[M]"), dates.astype("datetime64[Y]")
        if part == "day":
            return (dates - months).astype(np.int64) + 1
        if part == "month":
            return months.astype(np.int64) % 12 + 1
        return years.astype(np.int64) + 1970
    weekday, hour = (days + 3) % 7, seconds // 3600 % 24  # 1970 began on a Thursday
    parts = {
        "minute": seconds // 60 % 60,
        "hour": hour,
        "weekday": weekday,
        "hour_of_week": weekday * 24 + hour,
        "seconds": seconds,
    }
    return parts[part]


def bags_of(column: pa.Array | pa.ChunkedArray, separator: str | None) -> Bags:
    """Returns the lists of a column, or those that texts with a separator are.

    Null is an empty list, and so is an empty text.
    """
    column = _plain(column)
    if kind_of(column.type) == "text":
        assert separator is not None
        texts = column.cast(pa.large_binary())
        nothing = pa.scalar(None, pa.large_binary())
        texts = pc.if_else(pc.equal(pc.binary_length(texts), 0), nothing, texts)
        column = pc.split_pattern(texts, pattern=separator)
    if kind_of(column.type) == "nothing":
        return Bags(column.slice(0, 0), np.zeros(len(column), dtype=np.int64))
    lengths = pc.list_value_length(column).fill_null(0)
    return Bags(pc.list_flatten(column), _numpy(lengths).astype(np.int64))
