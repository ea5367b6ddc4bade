"""Writes a suggestion down, as a training configuration with comments."""

import json
import re
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta

from fusedrec_torchrec.training.data.infer import MANY, ColumnFacts, Suggestion
from fusedrec_torchrec.training.data.table_options import NAME, TAKEN, UNIT_SECONDS, CsvOptions
from fusedrec_torchrec.training.data.vocabulary import RESERVED

__all__ = ["yaml_of"]

PLAIN = re.compile(r"[A-Za-z_][A-Za-z0-9_./*-]*")
WORDS_OF_YAML = ("true", "false", "yes", "no", "on", "off", "null", "y", "n")
LARGEST_BATCH, LANES = 2048, 8
START_SHARE = 0.9


def yaml_of(
    suggestion: Suggestion,
    rows: int,
    files: Sequence[str],
    file_format: str | None,
    csv: CsvOptions,
    directory: str,
) -> str:
    """Returns a configuration that trains on the files.

    Args:
        suggestion: what samples are made of.
        rows: how many the files have.
        files: as the user named them.
        file_format: as the user gave it, if so.
        csv: as the user gave it.
        directory: where the run writes.
    """
    lines = [
        f"# Suggested by `fusedrec prepare --infer` from {rows:,} rows. Look it over, then:",
        "#   fusedrec train --config THIS_FILE",
        "model:",
        "  embedding_dim: 16",
        "  dense_arch: [64, 16]",
        "  over_arch: [64, 32, 1]",
        "data:",
        "  table:",
        f"    files: [{', '.join(map(_text, files))}]",
    ]
    if file_format is not None:
        lines.append(f"    format: {file_format}")
    if csv != CsvOptions():
        lines += _csv(csv)
    lines.append(f"    label: {_text(suggestion.label)}")
    lines += _times(suggestion)
    lines += _dense(suggestion.dense)
    lines.append("    sparse:")
    names = _Names()
    for column in suggestion.sparse:
        lines.append(_feature(column, names))
    lines += [f"      {name}: {{}} # part of the time" for name in _parts(suggestion)]
    for name, reason in suggestion.left_out.items():
        lines.append(f"    # left out: {json.dumps(name)}, {reason}")
    lines += [f"  batch_size: {_batch_size(rows)}", "logging:", f"  directory: {_text(directory)}"]
    return "\n".join(lines) + "\n"


def _csv(csv: CsvOptions) -> list[str]:
    lines = ["    csv:"]
    if csv.columns:
        lines.append(f"      columns: [{', '.join(map(_text, csv.columns))}]")
    if csv.delimiter is not None:
        lines.append(f"      delimiter: {json.dumps(csv.delimiter)}")
    if csv.quote != CsvOptions().quote:
        lines.append(f"      quote: {json.dumps(csv.quote)}")
    return lines


def _times(suggestion: Suggestion) -> list[str]:
    column = suggestion.timestamp
    if column is None:
        return []
    unit = f", unit: {suggestion.unit}" if suggestion.unit else ""
    about = _about(column)
    if suggestion.unit is not None:
        first, last = (
            _moment(seconds, suggestion.unit) for seconds in (column.least, column.greatest)
        )
        about = f"{first} to {last}"
    lines = [f"    timestamp: {{column: {_text(column.name)}{unit}}} # {about}"]
    parts = ", ".join(f"{name}: {part}" for name, part in _parts(suggestion).items())
    if parts:
        lines.append(f"    times: {{{parts}}}")
    start = _start(column, suggestion.unit)
    if start is not None:
        lines.append(f"    # split: {{by: time, start: {start}}} # holds out the end of the time")
    return lines


def _parts(suggestion: Suggestion) -> dict[str, str]:
    """Returns the columns to make of the timestamp: names that are free, and parts."""
    if suggestion.timestamp is None:
        return {}
    taken = {column.name for column in (*suggestion.dense, *suggestion.sparse)}
    taken |= {suggestion.timestamp.name, suggestion.label, *suggestion.left_out}
    names = {"hour_of_day": "hour", "weekday": "weekday"}
    return {name: part for name, part in names.items() if name not in taken}


def _start(column: ColumnFacts, unit: str | None) -> str | None:
    if unit is None or column.least >= column.greatest:
        return None
    return _moment(column.least + START_SHARE * (column.greatest - column.least), unit)


def _moment(time: float, unit: str) -> str:
    seconds = round(time * UNIT_SECONDS[unit])
    moment = datetime(1970, 1, 1, tzinfo=UTC) + timedelta(seconds=seconds)
    return moment.strftime("%Y-%m-%d %H:%M:%S")


def _dense(columns: Sequence[ColumnFacts]) -> list[str]:
    if not columns:
        return ["    dense: []"]
    lines = [f"      - {_text(column.name)} # {_about(column)}" for column in columns]
    return ["    dense:", *lines]


class _Names:
    """Gives features names that are allowed, each of them once."""

    def __init__(self) -> None:
        self._taken: set[str] = {"label"}

    def of(self, column: str) -> str:
        """Returns a name for the feature of a column."""
        name = column if NAME.fullmatch(column) else re.sub(r"[^A-Za-z0-9_-]+", "_", column)
        name = name or "feature"
        while name in self._taken:
            name += "_"
        self._taken.add(name)
        return name


def _feature(column: ColumnFacts, names: _Names) -> str:
    name = names.of(column.name)
    settings = []
    if name != column.name:
        settings.append(f"column: {_text(column.name)}")
    if name in TAKEN:
        settings.append(f"table: {name}_table")
    if column.is_list:
        settings.append("bag: true")
    elif column.separator is not None:
        settings += ["bag: true", f"separator: {json.dumps(column.separator)}"]
    return f"      {_text(name)}: {{{', '.join(settings)}}} # {_about(column)}; {_rows(column)}"


def _rows(column: ColumnFacts) -> str:
    rows = column.distinct + RESERVED
    if column.separator is not None and not column.is_list:
        return "rows of its parts are counted when it is prepared"
    if column.distinct > MANY:
        return f"about {rows:,} rows; tables: {{...: {{hash_rows: 1_000_000}}}} would bound it"
    return f"{'' if column.exact else 'about '}{rows:,} rows"


def _about(column: ColumnFacts) -> str:
    """Returns what a column holds, in a few words."""
    words = [column.type]
    if column.numeric and column.values and not column.is_list:
        kind = "whole number" if column.whole else "number"
        kind = f"{kind} in text" if column.type == "text" else column.type
        words[0] = f"{kind}, {_number(column.least)} to {_number(column.greatest)}"
    words.append(f"{'' if column.exact else 'about '}{column.distinct:,} values")
    empty = "empty" if column.is_list else "missing"
    share = column.missing_share
    words.append(f"{share:.2%} {empty}" if share else f"none {empty}")
    return ", ".join(words)


def _number(value: float) -> str:
    return f"{value:,.0f}" if value.is_integer() and abs(value) < 1e15 else f"{value:g}"


def _batch_size(rows: int) -> int:
    """Returns a size that a tenth of the rows fills."""
    size = LARGEST_BATCH
    while size > LANES and size > rows // 10:
        size //= 2
    return size


def _text(text: str) -> str:
    """Returns a text as YAML has it."""
    if PLAIN.fullmatch(text) and text.lower() not in WORDS_OF_YAML:
        return text
    return json.dumps(text)
