"""A run of samples in memory, and the interface of what holds them."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

__all__ = ["DamagedDataError", "Samples", "Source", "ids_by_feature", "ids_by_table"]


class DamagedDataError(ValueError):
    """Is raised for a file of the data that cannot be read; it names the file and what to do."""


@dataclass(frozen=True)
class Samples:
    """Holds n samples of F features.

    Attributes:
        dense: [n, number of dense features].
        labels: [n], 1 for a click.
        ids: the ids of all bags, feature by feature, sample by sample.
        lengths: [F, n] ids in each bag; None if every bag has one.
        weights: of each id in the sum of its bag; None if all count once.
    """

    dense: NDArray[np.float32]
    labels: NDArray[np.float32]
    ids: NDArray[np.int64]
    lengths: NDArray[np.int32] | None = None
    weights: NDArray[np.float32] | None = None

    def __len__(self) -> int:
        return len(self.labels)

    @staticmethod
    def concatenate(chunks: Sequence["Samples"]) -> "Samples":
        """Returns the samples of all chunks, one chunk after another."""
        if len(chunks) == 1:
            return chunks[0]
        dense = np.concatenate([chunk.dense for chunk in chunks])
        labels = np.concatenate([chunk.labels for chunk in chunks])
        if chunks[0].lengths is None:
            ids = np.concatenate([p.ids.reshape(-1, len(p)) for p in chunks], axis=1)
            return Samples(dense, labels, ids.ravel())
        lengths = [chunk.lengths for chunk in chunks if chunk.lengths is not None]
        features = len(lengths[0])
        # Bags stand chunk by chunk; their new order is feature by feature.
        before = np.cumsum([0] + [of_chunk.size for of_chunk in lengths])
        order = np.concatenate(
            [
                start + feature * of_chunk.shape[1] + np.arange(of_chunk.shape[1])
                for feature in range(features)
                for start, of_chunk in zip(before, lengths, strict=False)
            ]
        )
        flat = np.concatenate([of_chunk.ravel() for of_chunk in lengths])
        places = _places_of_bags(flat, order)
        ids = np.concatenate([chunk.ids for chunk in chunks])[places]
        weights = None
        if chunks[0].weights is not None:
            weights = np.concatenate([c.weights for c in chunks if c.weights is not None])[places]
        return Samples(dense, labels, ids, flat[order].reshape(features, -1), weights)

    def take(self, which: NDArray[np.int64]) -> "Samples":
        """Returns the samples at these places, in this order."""
        dense, labels = self.dense[which], self.labels[which]
        if self.lengths is None:
            return Samples(dense, labels, self.ids.reshape(-1, len(self))[:, which].ravel())
        features, n = self.lengths.shape
        bags = (np.arange(features)[:, None] * n + which).ravel()
        places = _places_of_bags(self.lengths.ravel(), bags)
        weights = None if self.weights is None else self.weights[places]
        return Samples(dense, labels, self.ids[places], self.lengths[:, which], weights)


def _places_of_bags(lengths: NDArray[np.int32], bags: NDArray[np.int64]) -> NDArray[np.int64]:
    """Returns where the ids of the given bags stand, one bag after another."""
    starts = np.cumsum(lengths, dtype=np.int64) - lengths
    taken = lengths[bags]
    ends = np.cumsum(taken, dtype=np.int64)
    total = int(ends[-1]) if len(ends) else 0
    return np.repeat(starts[bags] - (ends - taken), taken) + np.arange(total)


def ids_by_feature(samples: Samples, features: int) -> Iterator[NDArray[np.int64]]:
    """Yields the ids of each feature, sample by sample."""
    if samples.lengths is None:
        yield from samples.ids.reshape(features, -1)
        return
    ends = np.cumsum(samples.lengths.sum(axis=1))
    yield from np.split(samples.ids, ends[:-1])


def ids_by_table(
    samples: Samples, features: Mapping[str, str]
) -> dict[str, tuple[NDArray[np.int64], NDArray[np.int64]]]:
    """Returns the ids of each table and the lengths of their bags, feature by feature.

    Args:
        samples: some samples.
        features: the table of each of their features.
    """
    lengths = np.ones((len(features), len(samples)), np.int64)
    if samples.lengths is not None:
        lengths = samples.lengths.astype(np.int64)
    of_tables: dict[str, tuple[list[NDArray[np.int64]], list[NDArray[np.int64]]]] = {}
    by_feature = ids_by_feature(samples, len(features))
    for table, ids, of_bags in zip(features.values(), by_feature, lengths, strict=True):
        all_ids, all_lengths = of_tables.setdefault(table, ([], []))
        all_ids.append(ids)
        all_lengths.append(of_bags)
    return {
        table: (np.concatenate(ids), np.concatenate(of_bags))
        for table, (ids, of_bags) in of_tables.items()
    }


class Source(Protocol):
    """Gives samples by number: a data set, or a generator that acts like one."""

    @property
    def samples(self) -> int:
        """How many samples there are."""

    @property
    def held_out(self) -> int | None:
        """How many of them, at the end, are for evaluation; None lets a share decide."""

    @property
    def identity(self) -> dict[str, Any]:
        """Plain data that differs for other samples, beyond what the configuration says."""

    @property
    def left_out(self) -> list[str]:
        """What was left out of the data and why, a line for each."""

    @property
    def dense_features(self) -> int: ...

    @property
    def table_rows(self) -> dict[str, int]:
        """Rows of the tables by name."""

    @property
    def features(self) -> dict[str, str]:
        """The table of each feature, in the order of the samples' bags."""

    @property
    def weighted(self) -> bool:
        """Whether ids have weights."""

    @property
    def blocks(self) -> NDArray[np.int64]:
        """Sizes of the runs in which samples are best read, in order."""

    def read(self, start: int, stop: int) -> Samples:
        """Returns the samples from ``start`` up to ``stop``.

        Raises:
            DamagedDataError: a file that holds them cannot be read.
        """
