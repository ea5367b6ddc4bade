"""A hot set: which rows of which tables are hot, and which samples need no others (FAE)."""

from collections.abc import Iterator, Mapping

import numpy as np
from numpy.typing import NDArray

from fusedrec_torchrec.data.samples import Samples

__all__ = ["HotSet", "ids_by_feature"]


class HotSet:
    """Hot rows by table.

    Args:
        table_rows: rows of each table.
        ids: hot ids of each table; a table that is missing has none.
    """

    def __init__(
        self, table_rows: Mapping[str, int], ids: Mapping[str, NDArray[np.int64]]
    ) -> None:
        self.table_rows = dict(table_rows)
        self.ids = {name: np.sort(ids.get(name, np.empty(0, np.int64))) for name in table_rows}

    @property
    def rows(self) -> int:
        """Hot rows of all tables."""
        return sum(map(len, self.ids.values()))

    def hot_samples(self, samples: Samples) -> NDArray[np.bool_]:
        """Whether all ids of a sample are hot; one without ids is."""
        hot = np.ones(len(samples), dtype=np.bool_)
        lengths = samples.lengths
        for feature, (name, ids) in enumerate(
            zip(self.ids, ids_by_feature(samples, len(self.ids)), strict=True)
        ):
            cold = ~_is_in(ids, self.ids[name], self.table_rows[name])
            if lengths is None:
                hot &= ~cold
            else:
                hot[np.repeat(np.arange(len(samples)), lengths[feature])[cold]] = False
        return hot


def _is_in(ids: NDArray[np.int64], hot: NDArray[np.int64], rows: int) -> NDArray[np.bool_]:
    if rows <= 1 << 26:  # a table of flags: a look-up for each id
        flags = np.zeros(rows, dtype=np.bool_)
        flags[hot] = True
        return flags[ids]
    return np.isin(ids, hot)


def ids_by_feature(samples: Samples, features: int) -> Iterator[NDArray[np.int64]]:
    """The ids of each feature, sample by sample."""
    if samples.lengths is None:
        yield from samples.ids.reshape(features, -1)
        return
    ends = np.cumsum(samples.lengths.sum(axis=1))
    yield from np.split(samples.ids, ends[:-1])
