"""The file that says which rows are used how often: written by ``fusedrec profile --save``.

FAE (VLDB 2022) counts the accesses of a 5 % sample of the inputs.  Here the counts are a summary of
bounded size, so a profile of tables of billions of rows stays small, and profiles of parts of the
data can be merged.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from fusedrec_torchrec.access.array_file import open_arrays, read_arrays, write_arrays

__all__ = ["AccessProfile"]

KIND = "access profile"


@dataclass(frozen=True)
class AccessProfile:
    """Holds how often the rows of some tables are accessed.

    Attributes:
        table_rows: rows of each table.
        samples: how many samples were counted.
        of_samples: how many there were.
        accesses: of each table, how many ids were counted.
        ids: of each table, its most used rows, the most used one first.
        counts: of each table, the accesses of these rows; too low by at most ``error``.
        error: how much too low a count can be.
        counters: how many rows were counted at a time, of all tables together.
    """

    table_rows: dict[str, int]
    samples: int
    accesses: dict[str, int]
    ids: dict[str, NDArray[np.int64]]
    counts: dict[str, NDArray[np.int64]]
    error: int
    counters: int
    of_samples: int = 0

    def __post_init__(self) -> None:
        object.__setattr__(self, "of_samples", max(self.of_samples, self.samples))

    def save(self, path: Path) -> None:
        """Writes the profile to a file, whole or not at all."""
        about = {
            "table_rows": self.table_rows,
            "samples": self.samples,
            "accesses": self.accesses,
            "error": self.error,
            "counters": self.counters,
            "of_samples": self.of_samples,
        }
        arrays = {}
        for number, name in enumerate(self.table_rows):
            arrays[f"ids_{number}"] = self.ids[name]
            arrays[f"counts_{number}"] = self.counts[name]
        write_arrays(path, KIND, about, arrays)

    @staticmethod
    def load(path: Path) -> "AccessProfile":
        """Returns the profile in a file.

        Raises:
            ValueError: no such file, or not a profile.
        """
        with open_arrays(path, KIND) as file:
            content = read_arrays(file, path, KIND)
        rows, accesses = content.table_rows(), content.counts_by_name("accesses")
        if set(accesses) != set(rows):
            raise ValueError(f"{path} is damaged: accesses are not those of its tables")
        ids = {name: content.ids(i, name) for i, name in enumerate(rows)}
        return AccessProfile(
            table_rows=rows,
            samples=content.count("samples"),
            accesses=accesses,
            ids=ids,
            counts={n: content.counts(f"counts_{i}", len(ids[n])) for i, n in enumerate(rows)},
            error=content.count("error"),
            counters=content.count("counters"),
            of_samples=content.count("of_samples", 0),  # older files do not say
        )

    def ranking(
        self, names: Sequence[str]
    ) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
        """Returns the rows of some tables, the most used first.

        Of equally used rows those of the first table come first.

        Returns:
            the place of its table in ``names``, the id and the accesses of each row.
        """
        tables = np.repeat(np.arange(len(names)), [len(self.ids[name]) for name in names])
        ids = np.concatenate([self.ids[name] for name in names])
        counts = np.concatenate([self.counts[name] for name in names])
        order = np.lexsort((ids, tables, -counts))
        return tables[order], ids[order], counts[order]

    def check(self, table_rows: Mapping[str, int]) -> None:
        """Compares the tables of the profile with those of a model.

        Raises:
            ValueError: the profile is of other tables.
        """
        for name, rows in table_rows.items():
            if name not in self.table_rows:
                raise ValueError(
                    f"the access profile has no table {name!r}; it is of "
                    f"{', '.join(self.table_rows)}"
                )
            if self.table_rows[name] != rows:
                raise ValueError(
                    f"the access profile counted table {name!r} with {self.table_rows[name]} "
                    f"rows, the model has {rows}: make a profile of the data that it trains on"
                )
