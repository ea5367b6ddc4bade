"""Finds out where an expression of columns is true: the labels of samples."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from fusedrec_torchrec.training.data.expression import (
    Column,
    Comparison,
    Expression,
    Junction,
    Not,
)
from fusedrec_torchrec.training.data.table_columns import flags_of, numbers_of, texts_of

__all__ = ["labels_of"]

Mask = NDArray[np.bool_]
# Takes where something is wrong, what kind of thing, with which column, and what it must be.
Note = Callable[[Mask, str, str, str], None]

COMPARE: dict[str, Any] = {
    "==": np.isin,
    "in": np.isin,
    "!=": lambda values, others: ~np.isin(values, others),
    "not in": lambda values, others: ~np.isin(values, others),
    "<": lambda values, others: values < others[0],
    "<=": lambda values, others: values <= others[0],
    ">": lambda values, others: values > others[0],
    ">=": lambda values, others: values >= others[0],
}


def labels_of(
    expression: Expression, columns: Mapping[str, Any], missing_words: Sequence[str], note: Note
) -> Mask:
    """Returns where an expression is true; a row whose value is missing or none is noted."""
    if isinstance(expression, Not):
        return ~labels_of(expression.inner, columns, missing_words, note)
    if isinstance(expression, Junction):
        parts = [labels_of(part, columns, missing_words, note) for part in expression.inner]
        return np.all(parts, axis=0) if expression.all else np.any(parts, axis=0)
    if isinstance(expression, Column):
        flags = flags_of(columns[expression.name], missing_words)
        note(flags.missing | ~flags.ok, "bad label", expression.name, "0 or 1, true or false")
        return flags.values
    return _compared(expression, columns[expression.column], missing_words, note)


def _compared(
    comparison: Comparison, column: Any, missing_words: Sequence[str], note: Note
) -> Mask:
    compare = COMPARE[comparison.operator]
    if comparison.kind == "text":
        texts = texts_of(column, missing_words)
        note(texts.missing | ~texts.ok, "bad label", comparison.column, "there, for the label")
        words = pa.array([text.encode() for text in comparison.texts], pa.large_binary())
        is_in = pc.is_in(texts.values, value_set=words).to_numpy(zero_copy_only=False)
        return compare(is_in, [True])
    if comparison.kind == "flag":
        flags = flags_of(column, missing_words)
        must = "0 or 1, true or false, for the label"
        note(flags.missing | ~flags.ok, "bad label", comparison.column, must)
        return compare(flags.values, np.array(comparison.values))
    numbers = numbers_of(column, missing_words)
    note(numbers.missing | ~numbers.ok, "bad label", comparison.column, "a number, for the label")
    return compare(numbers.values, np.array(comparison.values))
