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
    def concatenate(parts: Sequence["Samples"]) -> "Samples":
        """Returns the samples of all parts, one part after another."""
        if len(parts) == 1:
            return parts[0]
        dense = np.concatenate([part.dense for part in parts])
        labels = np.concatenate([part.labels for part in parts])
        if parts[0].lengths is None:
            ids = np.concatenate([p.ids.reshape(-1, len(p)) for p in parts], axis=1)
            return Samples(dense, labels, ids.ravel())
        lengths = [part.lengths for part in parts if part.lengths is not None]
        features = len(lengths[0])
        # Bags stand part by part; their new order is feature by feature.
        before = np.cumsum([0] + [part.size for part in lengths])
        order = np.concatenate(
            [
                start + feature * part.shape[1] + np.arange(part.shape[1])
                for feature in range(features)
                for start, part in zip(before, lengths, strict=False)
            ]
        )
        flat = np.concatenate([part.ravel() for part in lengths])
        ids = _take_bags(np.concatenate([part.ids for part in parts]), flat, order)
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
