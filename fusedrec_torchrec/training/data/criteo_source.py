"""Criteo's text as a source of samples."""

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from fusedrec_torchrec.training.data.bad_lines import BadLines
from fusedrec_torchrec.training.data.criteo import CATEGORIES, INTEGERS, LABEL, RawColumns, read
from fusedrec_torchrec.training.data.dense_transform import log_of
from fusedrec_torchrec.training.data.lines import TextFile
from fusedrec_torchrec.training.data.prepare_options import PrepareOptions
from fusedrec_torchrec.training.data.raw_source import (
    Feature,
    Layout,
    Position,
    RawSamples,
    TableRule,
)

__all__ = ["CriteoSource"]


class CriteoSource:
    """Is a ``RawSource`` of lines in Criteo's format.

    Args:
        files: of text.
        options: how text becomes parquet.
    """

    splits = False

    def __init__(self, files: Sequence[TextFile], options: PrepareOptions) -> None:
        self._files = files
        self._transform = options.dense_transform
        rule = TableRule(options.min_count, options.max_rows)
        self.layout = Layout(
            dense=INTEGERS,
            features=[Feature(name, name) for name in CATEGORIES],
            tables=dict.fromkeys(CATEGORIES, rule),
        )
        self.options: dict[str, Any] = {
            key: value
            for key, value in asdict(options).items()
            if key not in ("memory_mb", "on_bad_line")
        }

    @property
    def files(self) -> Sequence[Path]:
        """The files, in order."""
        return [file.path for file in self._files]

    def read(self, position: Position, bad_lines: BadLines) -> Iterator[RawSamples]:
        """Yields samples from a position on, malformed lines left out and noted."""
        before = [0, *np.cumsum([path.stat().st_size for path in self.files]).tolist()]
        for number in range(position.file, len(self._files)):
            place = position if number == position.file else Position(number)
            for columns, block in read(self._files[number], bad_lines, place.end, place.line):
                line = block.first_line + block.data.count(b"\n")
                behind = Position(number, block.end, line)
                yield RawSamples(self._table(columns), behind, before[number] + block.packed)

    def _table(self, columns: RawColumns) -> pa.Table:
        dense = self._dense(columns.integers)
        arrays = [pa.array(columns.labels)]
        arrays += [pa.array(dense[:, i]) for i in range(len(INTEGERS))]
        values, missing = columns.categories, columns.missing_categories
        arrays += [pa.array(values[:, i], mask=missing[:, i]) for i in range(len(CATEGORIES))]
        return pa.table(arrays, names=[LABEL, *INTEGERS, *CATEGORIES])

    def _dense(self, integers: NDArray[np.int64]) -> NDArray[np.float32]:
        if self._transform == "log":
            return log_of(integers).astype(np.float32)
        return integers.astype(np.float32)
