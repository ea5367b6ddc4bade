"""A run of samples in memory, and the interface of what holds them."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

__all__ = ["DamagedDataError", "Samples", "Source"]


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
    """

    dense: NDArray[np.float32]
    labels: NDArray[np.float32]
    ids: NDArray[np.int64]
    lengths: NDArray[np.int32] | None = None

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
        ids = _take_bags(np.concatenate([chunk.ids for chunk in chunks]), flat, order)
        return Samples(dense, labels, ids, flat[order].reshape(features, -1))

    def take(self, which: NDArray[np.int64]) -> "Samples":
        """Returns the samples at these places, in this order."""
        dense, labels = self.dense[which], self.labels[which]
        if self.lengths is None:
            return Samples(dense, labels, self.ids.reshape(-1, len(self))[:, which].ravel())
        features, n = self.lengths.shape
        bags = (np.arange(features)[:, None] * n + which).ravel()
        ids = _take_bags(self.ids, self.lengths.ravel(), bags)
        return Samples(dense, labels, ids, self.lengths[:, which])


def _take_bags(
    ids: NDArray[np.int64], lengths: NDArray[np.int32], bags: NDArray[np.int64]
) -> NDArray[np.int64]:
    """Returns the ids of the given bags, one bag after another."""
    starts = np.cumsum(lengths, dtype=np.int64) - lengths
    taken = lengths[bags]
    ends = np.cumsum(taken, dtype=np.int64)
    total = int(ends[-1]) if len(ends) else 0
    return ids[np.repeat(starts[bags] - (ends - taken), taken) + np.arange(total)]


class Source(Protocol):
    """Gives samples by number: a data set, or a generator that acts like one."""

    @property
    def samples(self) -> int:
        """How many samples there are."""

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
        """Rows of the tables by name; a feature has its table's name."""

    @property
    def blocks(self) -> NDArray[np.int64]:
        """Sizes of the runs in which samples are best read, in order."""

    def read(self, start: int, stop: int) -> Samples:
        """Returns the samples from ``start`` up to ``stop``.

        Raises:
            DamagedDataError: a file that holds them cannot be read.
        """
