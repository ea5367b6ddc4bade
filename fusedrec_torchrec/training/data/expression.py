"""Parses expressions of columns, such as ``behavior in [buy, cart]``: the labels of samples.

Python's own parser reads the text, and only what is listed here is understood; nothing is ever
evaluated as Python.  What stands left of a comparison is a column, what stands right of it a value:
a number, a text, or a bare word, which is a text.
"""

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

__all__ = [
    "Column",
    "Comparison",
    "Expression",
    "Junction",
    "Not",
    "columns_of",
    "parse_expression",
]

Value = str | float | bool
Operator = Literal["==", "!=", "<", "<=", ">", ">=", "in", "not in"]
OPERATORS: dict[type[ast.cmpop], Operator] = {
    ast.Eq: "==",
    ast.NotEq: "!=",
    ast.Lt: "<",
    ast.LtE: "<=",
    ast.Gt: ">",
    ast.GtE: ">=",
    ast.In: "in",
    ast.NotIn: "not in",
}
ALLOWED = (
    "allowed are a column of 0 and 1, COLUMN == VALUE, !=, <, <=, >, >=, COLUMN in [VALUE, ...], "
    "and, or, not, and parentheses; a value is a number, true, false, a word or a text in quotes; "
    "a column whose name is no single word stands between backquotes"
)
QUOTED = re.compile(r"`([^`]+)`")
PLACEHOLDER = "column_between_backquotes_"
LONGEST, DEEPEST = 10_000, 50


@dataclass(frozen=True)
class Column:
    """Is a column of 0 and 1, or of true and false."""

    name: str


@dataclass(frozen=True)
class Comparison:
    """Compares a column with a value, or with several where the operator is in or not in."""

    column: str
    operator: Operator
    values: tuple[Value, ...]

    @property
    def kind(self) -> Literal["number", "flag", "text"]:
        """What is compared; a number among texts is a text."""
        if all(isinstance(value, bool) for value in self.values):
            return "flag"
        return "number" if all(isinstance(value, float) for value in self.values) else "text"

    @property
    def texts(self) -> tuple[str, ...]:
        """The values as they would stand in a text file."""
        return tuple(_text(value) for value in self.values)


@dataclass(frozen=True)
class Not:
    """Is true where another expression is not."""

    inner: "Expression"


@dataclass(frozen=True)
class Junction:
    """Is true where one of several expressions is, or where all are."""

    inner: "tuple[Expression, ...]"
    all: bool = False


Expression = Column | Comparison | Not | Junction


def parse_expression(text: str) -> Expression:
    """Returns what a text says.

    Raises:
        ValueError: it says something else than what is allowed.
    """
    names: list[str] = []

    def replaced(match: re.Match[str]) -> str:
        names.append(match[1])
        return f"{PLACEHOLDER}{len(names) - 1}"

    plain = QUOTED.sub(replaced, text.strip())
    try:
        if len(text) > LONGEST:
            raise SyntaxError(f"it has {len(text)} characters, may have {LONGEST}")
        tree = ast.parse(plain, mode="eval").body
        return _Parser(names).expression(tree, 0)
    except (SyntaxError, ValueError, LookupError, ArithmeticError, RecursionError) as error:
        reason = error.msg if isinstance(error, SyntaxError) else str(error)
        raise ValueError(f"{text!r} is no expression ({reason}); {ALLOWED}") from None


def columns_of(expression: Expression) -> Iterator[str]:
    """Yields the columns of an expression, as often as they occur."""
    if isinstance(expression, Column):
        yield expression.name
    elif isinstance(expression, Comparison):
        yield expression.column
    elif isinstance(expression, Not):
        yield from columns_of(expression.inner)
    else:
        for inner in expression.inner:
            yield from columns_of(inner)


class _Parser:
    """Makes an expression of Python's syntax tree.

    Args:
        names: columns that stood between backquotes.
    """

    def __init__(self, names: list[str]) -> None:
        self._names = names

    def expression(self, node: ast.expr, depth: int) -> Expression:
        if depth > DEEPEST:
            raise ValueError("it is nested too deeply")
        if isinstance(node, ast.Name):
            return Column(self._column(node))
        if isinstance(node, ast.BoolOp):
            inner = tuple(self.expression(value, depth + 1) for value in node.values)
            return Junction(inner, all=isinstance(node.op, ast.And))
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
            return Not(self.expression(node.operand, depth + 1))
        if isinstance(node, ast.Compare):
            return self._comparison(node)
        raise ValueError(f"{ast.unparse(node)!r} is not allowed")

    def _comparison(self, node: ast.Compare) -> Comparison:
        operator = OPERATORS.get(type(node.ops[0]))
        if operator is None or len(node.ops) > 1:
            raise ValueError(f"{ast.unparse(node)!r} is no comparison of a column with a value")
        right = node.comparators[0]
        many = operator in ("in", "not in")
        if many and not isinstance(right, ast.List | ast.Tuple | ast.Set):
            raise ValueError(f"{operator} needs a list of values, such as [buy, cart]")
        values = right.elts if isinstance(right, ast.List | ast.Tuple | ast.Set) else [right]
        if not many and len(values) != 1:
            raise ValueError(f"{operator} compares with one value; use in for several")
        if not values:
            raise ValueError(f"{operator} needs at least one value")
        comparison = Comparison(
            self._column(node.left), operator, tuple(self._value(value) for value in values)
        )
        if operator in ("<", "<=", ">", ">=") and comparison.kind != "number":
            raise ValueError(f"{operator} compares numbers, not {ast.unparse(right)!r}")
        return comparison

    def _column(self, node: ast.expr) -> str:
        if not isinstance(node, ast.Name):
            raise ValueError(f"{ast.unparse(node)!r} stands where a column must stand")
        if node.id.startswith(PLACEHOLDER):
            return self._names[int(node.id.removeprefix(PLACEHOLDER))]
        return node.id

    def _value(self, node: ast.expr) -> Value:
        if isinstance(node, ast.Name):
            word = self._column(node)
            return {"true": True, "false": False}.get(word.lower(), word)
        negative = isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub)
        constant = node.operand if negative and isinstance(node, ast.UnaryOp) else node
        if isinstance(constant, ast.Constant):
            value = constant.value
            if isinstance(value, bool) or (isinstance(value, str) and not negative):
                return value
            if isinstance(value, int | float):
                return -float(value) if negative else float(value)
        raise ValueError(f"{ast.unparse(node)!r} is no value")


def _text(value: Value) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return f"{value:.0f}" if isinstance(value, float) and value.is_integer() else str(value)
