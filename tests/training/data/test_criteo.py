"""Criteo's text format, well-formed and not."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torchrec.datasets import criteo

from fusedrec_torchrec.training.data.bad_lines import BadLines
from fusedrec_torchrec.training.data.criteo import (
    CATEGORIES,
    INTEGERS,
    LABEL,
    RawColumns,
    parse,
    read,
)
from fusedrec_torchrec.training.data.lines import Block, TextFile
from tests.training.data.criteo_text import line, lines, write


def read_all(path: Path, bad_lines: BadLines) -> RawColumns:
    parts = [columns for columns, _ in read(TextFile(path), bad_lines)]
    return RawColumns(
        *(
            np.concatenate([getattr(part, name) for part in parts])
            for name in RawColumns.__dataclass_fields__
        )
    )


@pytest.mark.parametrize("end", ["\n", "\r\n"])
@pytest.mark.parametrize("name", ["train.txt", "day_0.gz"])
def test_columns_are_what_python_reads(tmp_path: Path, end: str, name: str) -> None:
    content = lines(500)
    columns = read_all(write(tmp_path / name, content, end), BadLines())
    assert len(columns) == len(content)
    for row, text in enumerate(content):
        cells = text.split("\t")
        assert columns.labels[row] == int(cells[0])
        for i, cell in enumerate(cells[1:14]):
            assert columns.missing_integers[row, i] == (cell == "")
            assert columns.integers[row, i] == int(cell or 0)
        for i, cell in enumerate(cells[14:]):
            assert columns.missing_categories[row, i] == (cell == "")
            assert columns.categories[row, i] == int(cell or "0", 16)


@given(st.lists(st.one_of(st.none(), st.integers(0, 2**32 - 1)), min_size=26, max_size=26))
@settings(max_examples=50)
def test_hexadecimals_of_any_length_and_case(values: list[int | None]) -> None:
    cells = ["" if v is None else (f"{v:x}" if v % 2 else f"{v:08X}") for v in values]
    text = "\t".join(["1", *["7"] * 13, *cells]) + "\n"
    columns = parse(Block(text.encode(), 1, 0, 0), lambda *bad: pytest.fail(str(bad)))
    assert columns.categories[0].tolist() == [v or 0 for v in values]
    assert columns.missing_categories[0].tolist() == [v is None for v in values]


BAD = {
    "0\t1\t2": "3 columns, must be 40",
    line() + "\textra": "41 columns, must be 40",
    "": "1 column, must be 40",
    "caf\udce9\tx": "2 columns, must be 40",
    line(integer="0x1F"): "column int_0 is '0x1F', must be an integer or empty",
    line(label=-1): "label is '-1', must be 0 or 1",
    line(label=2): "label is '2', must be 0 or 1",
    line(integer="3.5"): "column int_0 is '3.5', must be an integer or empty",
    line(integer="9" * 30): "column int_0 is",
    line(category="xyz"): "column cat_0 is 'xyz', must be 1 to 8 hexadecimal digits or empty",
    line(category="123456789"): "column cat_0 is '123456789'",
    line(category="\u00e9a"): "column cat_0 is",
    line(category="a\rb"): "column cat_0 is",
}


@pytest.mark.parametrize(("text", "reason"), BAD.items())
def test_a_malformed_line_is_an_error_with_its_number(
    tmp_path: Path, text: str, reason: str
) -> None:
    path = write(tmp_path / "bad.tsv", [line(), line(), text, line()])
    with pytest.raises(ValueError, match="on_bad_line") as caught:
        read_all(path, BadLines())
    assert str(caught.value).startswith(f"{path}:3: ")
    assert reason in str(caught.value)


def test_malformed_lines_are_skipped_counted_and_reported(tmp_path: Path) -> None:
    content = [line(1)]
    for text in BAD:
        content += [text, line(1)]
    bad_lines = BadLines("skip")
    columns = read_all(write(tmp_path / "bad.tsv", content), bad_lines)
    assert len(columns) == len(BAD) + 1
    assert columns.labels.all() and (columns.categories == 0x2A).all()
    assert bad_lines.total == len(BAD)
    assert bad_lines.counts["wrong number of columns"] == 4
    assert bad_lines.counts["bad label"] == 2
    assert bad_lines.counts["bad integer"] == 3
    assert bad_lines.counts["bad hex"] == 4
    numbers = [int(example.split(":")[1]) for example in bad_lines.examples]
    assert numbers == [2 * i + 2 for i in range(len(BAD))]


def test_good_lines_beside_a_bad_integer_keep_their_values(tmp_path: Path) -> None:
    content = [*lines(50), line(integer="-2")]
    bad_lines = BadLines("skip")
    mixed = read_all(write(tmp_path / "m", [*content, line(integer="x")]), bad_lines)
    alone = read_all(write(tmp_path / "a", content), BadLines())
    assert bad_lines.total == 1
    assert (mixed.integers == alone.integers).all() and (mixed.integers < 0).any()
    assert (mixed.missing_integers == alone.missing_integers).all()


def test_a_truncated_gzip_is_a_bad_line(tmp_path: Path) -> None:
    path = write(tmp_path / "cut.gz", lines(300))
    path.write_bytes(path.read_bytes()[:-2000])
    with pytest.raises(ValueError, match="truncated gzip"):
        read_all(path, BadLines())
    bad_lines = BadLines("skip")
    columns = read_all(path, bad_lines)
    assert 0 < len(columns) < 300
    assert bad_lines.counts == {"broken file": 1}
    assert f"cut.gz:{len(columns) + 1}: truncated gzip" in bad_lines.examples[0]


def test_only_the_first_malformed_lines_are_kept_as_examples(tmp_path: Path) -> None:
    bad_lines = BadLines("skip")
    read_all(write(tmp_path / "bad.tsv", [line(), *["x"] * 100]), bad_lines)
    assert bad_lines.total == 100 and len(bad_lines.examples) == BadLines.MAX_EXAMPLES


def test_columns_are_called_as_torchrec_calls_them() -> None:
    assert LABEL == criteo.DEFAULT_LABEL_NAME
    assert INTEGERS == criteo.DEFAULT_INT_NAMES
    assert CATEGORIES == criteo.DEFAULT_CAT_NAMES
