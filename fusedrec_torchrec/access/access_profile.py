"""The file that says which rows are used how often: written by ``fusedrec profile --save``.

FAE (VLDB 2022) counts the accesses of a 5 % sample of the inputs.  Here the counts are a summary of
bounded size, so a profile of tables of billions of rows stays small, and profiles of parts of the
data can be merged.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from fusedrec_torchrec.access.array_file import (
    ArrayFile,
    open_arrays,
    read_arrays,
    write_arrays,
)
from fusedrec_torchrec.access.bag_counts import CountedBags

__all__ = ["COUNTERS", "AccessProfile"]

COUNTERS = 1 << 20  # rows that are counted at a time, unless somebody says otherwise
KIND = "access profile"
OF_BATCHES = ("samples_K", "batches_K", "bags_K", "ids_K")
OF_SAMPLES = ("counted", "all_bags", "all_ids")


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
        bags: how many bags are distinct, of tables with bags of several ids; older files do not
            say.
    """

    table_rows: dict[str, int]
    samples: int
    accesses: dict[str, int]
    ids: dict[str, NDArray[np.int64]]
    counts: dict[str, NDArray[np.int64]]
    error: int
    counters: int
    of_samples: int = 0
    bags: dict[str, CountedBags] = field(default_factory=dict)

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
            if name in self.bags:
                bags = self.bags[name]
                arrays |= {f"{part}_{number}": getattr(bags, part) for part in OF_BATCHES}
                sums = [getattr(bags, part) for part in OF_SAMPLES]
                arrays[f"bags_{number}"] = np.array(sums, np.int64)
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
            bags={n: _bags(content, i) for i, n in enumerate(rows) if content.has(f"bags_{i}")},
        )

    def ranking(
        self, names: Sequence[str]
    ) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
        """Returns the rows of some tables, the most used first.

        Of equally used rows those of the first table come first.

        Returns:
            the number of its table in ``names``, the id and the accesses of each row.
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


def _bags(content: ArrayFile, number: int) -> CountedBags:
    """Returns what a file says of the bags of a table."""
    samples = content.counts(f"samples_K_{number}")
    if len(samples) and (samples[0] < 1 or (np.diff(samples) < 1).any()):
        raise ValueError(
            f"the access profile is damaged: samples_K_{number} is {samples[:10].tolist()}, must "
            "be ascending numbers of at least 1"
        )
    batches, bags, ids = (
        content.counts(f"{part}_{number}", len(samples)) for part in OF_BATCHES[1:]
    )
    sums = content.counts(f"bags_{number}", len(OF_SAMPLES)).tolist()
    return CountedBags(samples, batches, bags, ids, *sums)
