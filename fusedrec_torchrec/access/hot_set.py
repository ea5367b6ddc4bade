"""A hot set: which rows of which tables are hot, and which samples need no others (FAE)."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from fusedrec_torchrec.access.access_profile import AccessProfile
from fusedrec_torchrec.access.array_file import open_arrays, read_arrays, write_arrays
from fusedrec_torchrec.access.samples import Samples, ids_by_feature

__all__ = ["HotSet"]

KIND = "hot set"
LARGEST_FLAGS = 1 << 26  # rows of a table with a flag for each


class HotSet:
    """Says which rows of which tables are hot.

    Args:
        table_rows: rows of each table.
        ids: hot ids of each table; a table that is missing has none.
    """

    def __init__(self, table_rows: Mapping[str, int], ids: Mapping[str, NDArray[np.int64]]) -> None:
        self.table_rows = dict(table_rows)
        self.ids = {name: np.sort(ids.get(name, np.empty(0, np.int64))) for name in table_rows}
        self._flags: dict[str, NDArray[np.bool_]] = {}

    @staticmethod
    def most_used(profile: AccessProfile, rows: int) -> "HotSet":
        """Returns the most used rows of all tables."""
        names = list(profile.table_rows)
        tables, ids, _ = (values[:rows] for values in profile.ranking(names))
        return HotSet(profile.table_rows, {name: ids[tables == t] for t, name in enumerate(names)})

    @property
    def rows(self) -> int:
        """How many rows of all tables are hot."""
        return sum(map(len, self.ids.values()))

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, HotSet)
            and self.table_rows == other.table_rows
            and all(np.array_equal(ids, other.ids[name]) for name, ids in self.ids.items())
        )

    __hash__ = None  # type: ignore[assignment]

    def save(self, path: Path) -> None:
        """Writes the hot set to a file, whole or not at all."""
        arrays = {f"ids_{i}": ids for i, ids in enumerate(self.ids.values())}
        write_arrays(path, KIND, {"table_rows": self.table_rows}, arrays)

    @staticmethod
    def load(path: Path) -> "HotSet":
        """Returns the hot set in a file.

        Raises:
            ValueError: no such file, or not a hot set.
        """
        with open_arrays(path, KIND) as file:
            return HotSet.read(file, path)

    @staticmethod
    def read(file: IO[bytes], source: object) -> "HotSet":
        """Reads an open file; ``source`` is what messages call it.

        Raises:
            ValueError: it is not a hot set.
        """
        content = read_arrays(file, source, KIND)
        rows = content.table_rows()
        return HotSet(rows, {name: content.ids(i, name) for i, name in enumerate(rows)})

    def check(self, table_rows: Mapping[str, int]) -> None:
        """Compares the tables of the hot set with those of a model.

        Raises:
            ValueError: the hot set is of other tables.
        """
        for name, rows in table_rows.items():
            if name not in self.table_rows:
                raise ValueError(
                    f"the hot set has no table {name!r}; it is of {', '.join(self.table_rows)}"
                )
            if self.table_rows[name] != rows:
                raise ValueError(
                    f"the hot set is of a table {name!r} with {self.table_rows[name]} rows, here "
                    f"it has {rows}: make one for this data"
                )

    def hot_samples(
        self, samples: Samples, tables: Iterable[str] | None = None
    ) -> NDArray[np.bool_]:
        """Returns whether all ids of each sample are hot; one without ids is.

        Args:
            samples: some samples.
            tables: the table of each of their features; those of the hot set, one by one, if None.
        """
        hot = np.ones(len(samples), dtype=np.bool_)
        names = list(self.ids) if tables is None else list(tables)
        for feature, (name, ids) in enumerate(
            zip(names, ids_by_feature(samples, len(names)), strict=True)
        ):
            cold = ~self._is_hot(name, ids)
            if samples.lengths is None:
                hot &= ~cold
            else:
                sample_of_id = np.repeat(np.arange(len(samples)), samples.lengths[feature])
                hot[sample_of_id[cold]] = False
        return hot

    def __getstate__(self) -> dict[str, Any]:
        """Leaves out the flags, which reader processes make for themselves."""
        return {"table_rows": self.table_rows, "ids": self.ids, "_flags": {}}

    def _is_hot(self, name: str, ids: NDArray[np.int64]) -> NDArray[np.bool_]:
        if self.table_rows[name] > LARGEST_FLAGS:
            return np.isin(ids, self.ids[name])
        if name not in self._flags:
            self._flags[name] = np.zeros(self.table_rows[name], dtype=np.bool_)
            self._flags[name][self.ids[name]] = True
        return self._flags[name][ids]
