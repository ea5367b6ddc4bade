"""Labels from expressions: what is allowed is understood, nothing else is, nothing is run."""

from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fusedrec_torchrec.training.data.expression import Column, columns_of, parse_expression
from fusedrec_torchrec.training.data.label import labels_of

COLUMNS = {
    "behavior": pa.array(["pv", "buy", "cart", "buy"]),
    "rating": pa.array([1.0, 3.5, 4.0, 5.0]),
    "stars": pa.array([b"1", b"3.5", b"4", b"5"]),
    "clicked": pa.array([0, 1, 1, 0]),
    "flag": pa.array([False, True, True, False]),
    "is it": pa.array(["yes", "no", "YES", "0"]),
    "code": pa.array([7, 8, 9, 7]),
}


def labels(text: str, columns: dict[str, Any] = COLUMNS) -> tuple[list[int], list[int]]:
    """Labels, and rows that were noted."""
    noted: list[int] = []

    def note(where: Any, *_: str) -> None:
        noted.extend(np.flatnonzero(where).tolist())

    values = labels_of(parse_expression(text), columns, [""], note)
    return values.astype(int).tolist(), noted


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("behavior in [buy, cart]", [0, 1, 1, 1]),
        ("behavior in (buy,)", [0, 1, 0, 1]),
        ("behavior not in ['buy', cart]", [1, 0, 0, 0]),
        ("behavior == buy", [0, 1, 0, 1]),
        ('behavior != "buy"', [1, 0, 1, 0]),
        ("rating >= 4", [0, 0, 1, 1]),
        ("rating > 4", [0, 0, 0, 1]),
        ("rating < 3.5", [1, 0, 0, 0]),
        ("rating <= 3.5", [1, 1, 0, 0]),
        ("rating > -1", [1, 1, 1, 1]),
        ("stars >= 4", [0, 0, 1, 1]),
        ("stars == 4.0", [0, 0, 1, 0]),
        ("stars in [1, 5]", [1, 0, 0, 1]),
        ("clicked", [0, 1, 1, 0]),
        ("not clicked", [1, 0, 0, 1]),
        ("flag", [0, 1, 1, 0]),
        ("flag == true", [0, 1, 1, 0]),
        ("clicked == False", [1, 0, 0, 1]),
        ("code == 7", [1, 0, 0, 1]),
        ("code == '7'", [1, 0, 0, 1]),
        ("code in [7, nine]", [1, 0, 0, 1]),
        ("`is it`", [1, 0, 1, 0]),
        ("`is it` == no", [0, 1, 0, 0]),
        ("behavior == buy and rating > 4", [0, 0, 0, 1]),
        ("behavior == pv or rating > 4", [1, 0, 0, 1]),
        ("not (behavior == pv or rating > 4)", [0, 1, 1, 0]),
        ("behavior == pv or behavior == buy and rating < 4", [1, 1, 0, 0]),
    ],
)
def test_an_expression_is_true_where_it_says(text: str, expected: list[int]) -> None:
    assert labels(text) == (expected, [])


@pytest.mark.parametrize(
    "text",
    [
        "",
        "a +",
        "1",
        "a + b",
        "f(a)",
        "a.b == 1",
        "a[0]",
        "lambda: 1",
        "__import__('os').system('true')",
        "1 < a < 3",
        "4 <= a",
        "a in b",
        "a in []",
        "a == [1, 2]",
        "a < word",
        "a is None",
        "a == b + 1",
        "a == f(1)",
        "a == -word",
        "a := 1",
        "a == 1; b",
        "[a for a in b]",
        "'text'",
        "a if b else c",
        "column_between_backquotes_3 == 1",
        "(" * 300 + "a" + ")" * 300,
        "not " * 3000 + "a",
        "a == 1e9999 and" + "x" * 20_000,
    ],
)
def test_whatever_is_not_allowed_is_refused_with_what_is(text: str) -> None:
    with pytest.raises(ValueError, match="is no expression") as caught:
        parse_expression(text)
    assert "COLUMN in [VALUE, ...]" in str(caught.value)


@given(st.text(max_size=60))
def test_any_text_is_an_expression_or_refused(text: str) -> None:
    try:
        list(columns_of(parse_expression(text)))
    except ValueError as error:
        problem = str(error)
    else:
        return
    assert "is no expression" in problem


def test_columns_are_found() -> None:
    text = "a == b or not (c and `d e` in [f])"
    assert list(columns_of(parse_expression(text))) == ["a", "c", "d e"]
    assert parse_expression("a") == Column("a")


def test_rows_whose_label_cannot_be_known_are_noted() -> None:
    columns = {
        "x": pa.array([b"1", b"", b"abc", None]),
        "y": pa.array(["a", "", None, "b"]),
        "z": pa.array([0, 1, 2, None]),
    }
    assert labels("x > 0", columns) == ([1, 0, 0, 0], [1, 2, 3])
    assert labels("y == a", columns) == ([1, 0, 0, 0], [1, 2])
    assert labels("z", columns) == ([0, 1, 0, 0], [2, 3])
    assert labels("x > 0 or y == b", columns)[1] == [1, 2, 3, 1, 2]
