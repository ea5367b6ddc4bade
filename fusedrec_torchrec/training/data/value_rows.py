"""Columns of categorical values to columns of table rows."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from fusedrec_torchrec.training.data.raw_source import Feature
from fusedrec_torchrec.training.data.vocabulary import hashed_rows_of, rows_of

__all__ = ["ValueRows"]


@dataclass(frozen=True)
class ValueRows:
    """Says which rows of a table values get.

    Attributes:
        vocabulary: of the table; None if values are hashed.
        table_rows: of the table.
    """

    vocabulary: NDArray[Any] | None
    table_rows: int

    def of(self, column: pa.Array, feature: Feature) -> pa.Array:
        """Returns a column of rows, or of lists of rows, for one of values."""
        if not feature.bag:
            return pa.array(self._rows(column))
        lengths = column.value_lengths().fill_null(0).to_numpy(zero_copy_only=False)
        offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
        return pa.ListArray.from_arrays(offsets, pa.array(self._rows(column.flatten())))

    def _rows(self, column: pa.Array) -> NDArray[np.int32]:
        missing = column.is_null().to_numpy(zero_copy_only=False)
        values = column.fill_null(0).to_numpy(zero_copy_only=False)
        if self.vocabulary is None:
            return hashed_rows_of(values, missing, self.table_rows)
        return rows_of(values, missing, self.vocabulary)
