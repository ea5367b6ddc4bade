"""What a preparation reads: samples whose categories are values yet, not rows of tables.

Criteo's text is one such source (``criteo_source``), files with other columns are another
(``table_source``).  What is made of them is the same.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from fusedrec_torchrec.training.data.bad_lines import BadLines

__all__ = ["Feature", "Layout", "Position", "RawSamples", "RawSource", "TableRule"]


@dataclass(frozen=True)
class Feature:
    """Describes a categorical feature.

    Attributes:
        name: of the feature and of its column.
        table: of the feature.
        bag: whether a sample has any number of ids, or one.
        weights: whether ids have weights, in a column beside.
    """

    name: str
    table: str
    bag: bool = False
    weights: bool = False


@dataclass(frozen=True)
class TableRule:
    """Says which values of a table get a row of their own.

    Attributes:
        min_count: values seen less often share a row.
        max_rows: most rows; None is no limit.
        hash_rows: rows of a table without a vocabulary; None for one that has it.
    """

    min_count: int = 1
    max_rows: int | None = None
    hash_rows: int | None = None


@dataclass(frozen=True)
class Layout:
    """Says what samples consist of.

    Attributes:
        dense: columns of dense features.
        features: the categorical ones.
        tables: by name.
        standardized: dense columns that are yet to be standardized; missing values in them are
            null, in others there are none.
        value_type: of categorical values.
    """

    dense: Sequence[str]
    features: Sequence[Feature]
    tables: dict[str, TableRule]
    standardized: Sequence[str] = ()
    value_type: type[np.unsignedinteger[Any]] = np.uint32


@dataclass(frozen=True)
class Position:
    """Is a place in the files of a source.

    Attributes:
        file: number of the file.
        end: what was read of it, in bytes of text or in rows.
        line: number of the next line or row, from 1.
    """

    file: int = 0
    end: int = 0
    line: int = 1


@dataclass(frozen=True)
class RawSamples:
    """Holds some samples.

    Attributes:
        columns: label (int8), dense columns, a column of values for each feature, null where they
            are missing, or of lists of values, and columns of weights.
        position: behind these samples.
        read: bytes of all files that were read so far, for progress.
        held_out: which of them are for evaluation only; None if none is.
    """

    columns: pa.Table
    position: Position
    read: int
    held_out: NDArray[np.bool_] | None = field(default=None)


class RawSource(Protocol):
    """Gives samples as they are in files."""

    @property
    def files(self) -> Sequence[Path]:
        """The files, in order."""

    @property
    def layout(self) -> Layout:
        """What samples consist of."""

    @property
    def options(self) -> dict[str, Any]:
        """Plain data: whatever else the result depends on."""

    @property
    def splits(self) -> bool:
        """Whether the source itself says which samples are held out."""

    def read(self, position: Position, bad_lines: BadLines) -> Iterator[RawSamples]:
        """Yields samples from a position on, malformed ones left out and noted."""
