"""The file that says which rows are used how often: written by ``fusedrec profile --save``.

FAE (VLDB 2022) counts the accesses of a 5 % sample of the inputs.  Here the counts are a summary of
bounded size, so a profile of tables of billions of rows stays small, and profiles of parts of the
data can be merged.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from fusedrec_torchrec.access.array_file import open_arrays, read_arrays, write_arrays
from fusedrec_torchrec.access.heavy_hitters import HeavyHitters

__all__ = ["AccessProfile", "Recorder"]

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

    @staticmethod
    def merged(parts: Sequence["AccessProfile"]) -> "AccessProfile":
        """Returns one profile of all the data from profiles of its parts.

        Raises:
            ValueError: the profiles are of different tables.
        """
        first = parts[0]
        for part in parts[1:]:
            if part.table_rows != first.table_rows:
                raise ValueError("profiles to merge must be of the same tables and rows")
        recorder = Recorder(first.table_rows, max(part.counters for part in parts))
        for part in parts:
            recorder.add_profile(part)
        return recorder.profile(sum(part.of_samples for part in parts))

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


class Recorder:
    """Counts accesses to the rows of tables, in bounded memory.

    Args:
        table_rows: rows of each table.
        counters: how many rows to count at a time, of all tables together.
    """

    def __init__(self, table_rows: Mapping[str, int], counters: int) -> None:
        self._rows = dict(table_rows)
        self._starts = np.cumsum([0, *self._rows.values()])
        self._hitters = HeavyHitters(counters)
        self._accesses = dict.fromkeys(self._rows, 0)
        self._samples = 0

    def add(self, ids: Sequence[NDArray[np.int64]], samples: int) -> None:
        """Counts the ids of some samples, table by table."""
        self._samples += samples
        for name, start, drawn in zip(self._rows, self._starts[:-1], ids, strict=True):
            self._accesses[name] += len(drawn)
            self._hitters.add(torch.from_numpy(drawn + start))

    def add_profile(self, part: AccessProfile) -> None:
        """Adds what another profile has counted."""
        self._samples += part.samples
        keys, counts = [], []
        for name, start in zip(self._rows, self._starts[:-1], strict=True):
            self._accesses[name] += part.accesses[name]
            keys.append(torch.from_numpy(part.ids[name] + start))
            counts.append(torch.from_numpy(part.counts[name]))
        self._hitters.merge(
            torch.cat(keys), torch.cat(counts), sum(part.accesses.values()), part.error
        )

    def profile(self, of_samples: int = 0) -> AccessProfile:
        """Returns what was counted.

        Args:
            of_samples: how many samples there are, counted or not.
        """
        keys, counts = (tensor.numpy() for tensor in self._hitters.content())
        tables = np.searchsorted(self._starts, keys, side="right") - 1
        places = [tables == t for t in range(len(self._rows))]
        named = list(zip(self._rows, self._starts[:-1], places, strict=True))
        return AccessProfile(
            table_rows=self._rows,
            samples=self._samples,
            accesses=dict(self._accesses),
            ids={name: keys[place] - start for name, start, place in named},
            counts={name: counts[place] for name, _, place in named},
            error=self._hitters.error,
            counters=self._hitters.counters,
            of_samples=of_samples,
        )
