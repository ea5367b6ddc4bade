"""Files with columns: found, told apart by their names, read from any position."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fusedrec_torchrec.training.data import lines, table_files
from fusedrec_torchrec.training.data.bad_lines import BadLines
from fusedrec_torchrec.training.data.delimited import Dialect, read_texts, split_lines
from fusedrec_torchrec.training.data.table_files import TableFile, find_table_files, opened
from fusedrec_torchrec.training.data.table_options import CsvOptions
from tests.training.data.table_text import write_csv, write_table, write_text


def names(files: list[TableFile]) -> list[tuple[str, str]]:
    return [(file.path.name, file.format) for file in files]


def test_files_folders_and_patterns_are_found_in_order(tmp_path: Path) -> None:
    (tmp_path / "day").mkdir()
    for name in ("p_10.parquet", "p_2.parquet", "notes.md", "_SUCCESS", ".hidden.csv", "x.csv.gz"):
        (tmp_path / name).write_text("x")
    (tmp_path / "day" / "z.feather").write_text("x")
    parts = [("p_2.parquet", "parquet"), ("p_10.parquet", "parquet")]
    assert names(find_table_files([tmp_path / "p_*.parquet"])) == parts
    assert names(find_table_files([tmp_path])) == [
        *parts,
        ("x.csv.gz", "csv"),
        ("z.feather", "feather"),
    ]
    assert names(find_table_files([tmp_path / "**/*.feather"])) == [("z.feather", "feather")]
    assert names(find_table_files([tmp_path / "notes.md"], "csv")) == [("notes.md", "csv")]


def test_what_is_not_there_is_named(tmp_path: Path) -> None:
    (tmp_path / "empty.csv").touch()
    (tmp_path / "a.xml").write_text("x")
    (tmp_path / "full.csv").write_text("x")
    (tmp_path / "folder").mkdir()
    for patterns, problem in (
        ([], "data.table.files is empty"),
        (["no.csv"], r"no\.csv does not exist"),
        (["no*.csv"], r"pattern '.*no\*\.csv' matches no file"),
        (["folder"], r"folder .* holds no data files \(.parquet, "),
        (["empty.csv"], r"empty\.csv is empty"),
        (["a.xml"], r"a\.xml ends in '\.xml', must be one of .parquet, .*or say format: parquet"),
        (["full.csv", "f*.csv"], r"full\.csv is named more than once"),
    ):
        with pytest.raises(ValueError, match=problem):
            find_table_files([tmp_path / pattern for pattern in patterns])


@pytest.mark.parametrize("header", [True, False])
@pytest.mark.parametrize("name", ["a.csv", "a.tsv", "a.csv.gz", "a.tsv.zst"])
def test_text_is_read_from_any_block_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, header: bool
) -> None:
    monkeypatch.setattr(lines, "BLOCK_BYTES", 2048)
    rows = [[str(i), f"value {i}"] for i in range(1500)]
    path = write_csv(tmp_path / name, rows, ["n", "text"] if header else None)
    options = CsvOptions(columns=[] if header else ["n", "text"])
    file = opened(TableFile(path, "csv"), options)
    assert list(file.schema) == ["n", "text"]
    blocks = list(file.read(["text"], 0, 1, BadLines()))
    assert len(blocks) > 3
    values = [value for rows in blocks for value in rows.columns["text"].to_pylist()]
    assert values == [f"value {i}".encode() for i in range(1500)]
    places = np.concatenate([rows.places for rows in blocks])
    assert places.tolist() == list(range(2, 1502) if header else range(1, 1501))
    later = list(file.read(["n"], blocks[1].end, blocks[1].line, BadLines()))
    assert later[0].places[0] == blocks[2].places[0]
    first = int(blocks[2].columns["text"][0].as_py().split()[1])
    assert [int(n.as_py()) for rows in later for n in rows.columns["n"]] == list(range(first, 1500))


@pytest.mark.parametrize("name", ["a.parquet", "a.arrow", "a.stream.arrow", "a.feather"])
@pytest.mark.parametrize("start", [0, 1, 30, 99, 100, 250, 299, 300])
def test_columns_are_read_from_any_row_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, start: int
) -> None:
    monkeypatch.setattr(table_files, "READ_ROWS", 40)
    path = write_table(tmp_path / name, {"n": list(range(300)), "m": [1.5] * 300}, rows=100)
    format_of: Any = "parquet" if name == "a.parquet" else "arrow"
    file = opened(TableFile(path, format_of), CsvOptions())
    assert {column: str(kind) for column, kind in file.schema.items()} == {
        "n": "int64",
        "m": "double",
    }
    blocks = list(file.read(["n"], start, start + 1, BadLines()))
    assert all(0 < len(rows.places) <= 40 and rows.columns.column_names == ["n"] for rows in blocks)
    values = [value for rows in blocks for value in rows.columns["n"].to_pylist()]
    assert values == list(range(start, 300))
    assert [place for rows in blocks for place in rows.places] == list(range(start + 1, 301))
    if blocks:
        assert (blocks[-1].end, blocks[-1].line) == (300, 301)


def test_headers_that_cannot_be_are_named(tmp_path: Path) -> None:
    for text, problem in (
        ("\n1,2\n", r"a\.csv:1: there is no header; name the columns"),
        ('"x,y\n1,2\n', r"a\.csv:1: there is no header"),
        ("x,y,x\n", r"a\.csv:1: the header has 'x' more than once"),
    ):
        path = write_text(tmp_path / "a.csv", text)
        with pytest.raises(ValueError, match=problem):
            _ = opened(TableFile(path, "csv"), CsvOptions()).schema
    path = write_text(tmp_path / "b.csv", "\ufeffx,y\n1,2\n")
    file = opened(TableFile(path, "csv"), CsvOptions())
    assert list(file.schema) == ["x", "y"]
    (rows,) = file.read(["x"], 0, 1, BadLines())
    assert rows.columns["x"].to_pylist() == [b"1"]


@given(
    st.lists(st.lists(st.text(st.sampled_from('ab,"\t '), max_size=4), min_size=1, max_size=4)),
    st.booleans(),
)
def test_quoted_values_are_read_as_they_were_written(rows: list[list[str]], always: bool) -> None:
    """By a writer as simple as the format is."""

    def cell(value: str) -> str:
        plain = not always and not any(mark in value for mark in ',"')
        return value if plain else '"' + value.replace('"', '""') + '"'

    data = "".join(",".join(map(cell, row)) + "\n" for row in rows).encode()
    if not data:
        return
    lines_of = split_lines(data, Dialect())
    assert lines_of.columns.tolist() == [len(row) for row in rows]
    for width in {len(row) for row in rows}:
        same = lines_of.columns == width
        table = read_texts(lines_of.joined(same), [str(i) for i in range(width)], Dialect())
        got = [[value.decode() for value in row.values()] for row in table.to_pylist()]
        assert got == [row for row in rows if len(row) == width]


@given(st.text(st.sampled_from('a,"'), max_size=12))
def test_whatever_quotes_are_there_pyarrow_sees_as_many_values_as_we(text: str) -> None:
    lines_of = split_lines(f"{text}\nb\n".encode(), Dialect())
    assert len(lines_of) == 2 and lines_of.columns[1] == 1
    if lines_of.columns[0]:
        width = int(lines_of.columns[0])
        first = lines_of.joined(np.array([True, False]))
        table = read_texts(first, [str(i) for i in range(width)], Dialect())
        assert table.num_rows == 1 and table.num_columns == width
