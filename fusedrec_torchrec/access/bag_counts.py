"""How many distinct bags a batch has, and how many ids are in them, counted.

Two bags are equal if they hold the same ids in the same order.  Whoever pools a table where it
lives sends one row for each distinct bag (RecD, MLSys 2023), so this is to such tables what the
number of distinct rows is to others.  It depends on the size of a batch, so it is counted in
batches of several sizes.
"""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

__all__ = ["BagCounter", "CountedBags", "DistinctBags", "bag_keys", "distinct_bags"]

SIZES = tuple(4**n for n in range(3, 9))  # samples of a batch, 64 to 65536
Floats = NDArray[np.float64]


class DistinctBags(NamedTuple):
    """Holds the distinct bags of a batch that are not empty, and the ids in them."""

    bags: float
    ids: float


@dataclass(frozen=True, eq=False)
class CountedBags:
    """Are bags that were counted in batches of K sizes.

    Attributes:
        samples_K: samples of a batch, ascending.
        batches_K: how many batches of each size were counted.
        bags_K: their distinct bags, all batches together.
        ids_K: ids in these distinct bags.
        counted: samples that were looked at.
        all_bags: bags of these samples that were not empty.
        all_ids: ids of these samples.
    """

    samples_K: NDArray[np.int64]
    batches_K: NDArray[np.int64]
    bags_K: NDArray[np.int64]
    ids_K: NDArray[np.int64]
    counted: int
    all_bags: int
    all_ids: int

    @property
    def full(self) -> float:
        """How many bags of a sample are not empty."""
        return self.all_bags / max(self.counted, 1)

    def distinct(self, samples: float) -> DistinctBags:
        """Returns the distinct bags of a batch, by a power law between the sizes counted."""
        bags, ids = self.full * samples, self.all_ids / max(self.counted, 1) * samples
        if not len(self.samples_K) or bags <= 0:
            return DistinctBags(bags, ids)
        seen_K = np.maximum(self.samples_K * self.batches_K, 1)
        kept = self._kept(self.bags_K / seen_K / self.full, samples)
        kept_ids = self._kept(self.ids_K / seen_K * samples / ids, samples)
        return DistinctBags(bags * kept, ids * kept_ids)

    def _kept(self, shares_K: Floats, samples: float) -> float:
        """Returns the share that is distinct in a batch, from that in batches of the K sizes."""
        x, y = np.log(self.samples_K), np.log(np.clip(shares_K, 1e-12, 1.0))
        at = float(np.log(max(samples, 1.0)))
        if at <= x[-1] or len(x) < 2:
            # Below the smallest size: a batch of one sample has nothing that repeats.
            value = float(np.interp(at, np.append(0.0, x), np.append(0.0, y)))
        else:
            slope = min(max((y[-1] - y[-2]) / (x[-1] - x[-2]), -1.0), 0.0)
            value = float(y[-1] + slope * (at - x[-1]))
        return min(float(np.exp(value)), 1.0)

    def plus(self, other: "CountedBags") -> "CountedBags":
        """Returns what was counted in two parts of the data."""
        size = max(len(self.samples_K), len(other.samples_K))
        longer = self if len(self.samples_K) == size else other
        if not np.array_equal(self.samples_K[:size], longer.samples_K[: len(self.samples_K)]) or (
            not np.array_equal(other.samples_K, longer.samples_K[: len(other.samples_K)])
        ):
            raise ValueError(
                f"batches of {self.samples_K.tolist()} and of {other.samples_K.tolist()} samples "
                "were counted, must be of the same sizes"
            )

        def added(name: str) -> NDArray[np.int64]:
            total = np.zeros(size, np.int64)
            for part in (self, other):
                values = getattr(part, name)
                total[: len(values)] += values
            return total

        return CountedBags(
            longer.samples_K,
            added("batches_K"),
            added("bags_K"),
            added("ids_K"),
            self.counted + other.counted,
            self.all_bags + other.all_bags,
            self.all_ids + other.all_ids,
        )


class BagCounter:
    """Counts the distinct bags of one table, in batches of ``SIZES`` one after another."""

    def __init__(self) -> None:
        self._keys: list[NDArray[np.uint64]] = []
        self._lengths: list[NDArray[np.int64]] = []
        self._samples: list[NDArray[np.int64]] = []  # number of each bag's sample
        self._waiting = self._counted = self._bags = self._ids = 0
        self._sums_3K = np.zeros((3, len(SIZES)), np.int64)  # batches, bags, ids

    def add(
        self, ids: NDArray[np.int64], lengths: NDArray[np.int64], samples: int | None = None
    ) -> None:
        """Counts the bags of some samples, one for each of them.

        Args:
            ids: of the bags, one bag after another.
            lengths: of the bags.
            samples: how many they are of, if every sample has several bags; those of all samples
                stand together then, the first ones first.
        """
        samples = len(lengths) if samples is None else samples
        keys, full = bag_keys(ids, lengths)
        self._keys.append(keys)
        self._lengths.append(full)
        self._samples.append(self._waiting + np.flatnonzero(lengths) % max(samples, 1))
        self._waiting += samples
        self._counted += samples
        self._bags += len(full)
        self._ids += len(ids)
        if self._waiting >= SIZES[-1]:
            self._count()

    def result(self) -> CountedBags:
        """Returns what was counted, in batches of all sizes that were complete."""
        self._count()
        sizes = np.array([s for s, n in zip(SIZES, self._sums_3K[0], strict=True) if n], np.int64)
        batches, bags, ids = self._sums_3K[:, : len(sizes)].copy()
        return CountedBags(sizes, batches, bags, ids, self._counted, self._bags, self._ids)

    def _count(self) -> None:
        if not self._waiting:
            return
        keys, lengths, samples = (
            np.concatenate(parts) for parts in (self._keys, self._lengths, self._samples)
        )
        for k, size in enumerate(SIZES):
            batches = self._waiting // size
            inside = samples < batches * size
            batch = (samples[inside] // size).astype(np.uint64)
            distinct = distinct_bags(_mixed(keys[inside] ^ _mixed(batch)), lengths[inside])
            self._sums_3K[:, k] += (batches, *map(int, distinct))
        self._keys, self._lengths, self._samples, self._waiting = [], [], [], 0


def distinct_bags(keys: NDArray[np.uint64], lengths: NDArray[np.int64]) -> DistinctBags:
    """Returns how many bags are distinct, and the ids in them.

    Args:
        keys, lengths: of bags that are not empty, from ``bag_keys``.
    """
    _, first = np.unique(keys, return_index=True)
    return DistinctBags(len(first), int(lengths[first].sum()))


def bag_keys(
    ids: NDArray[np.int64], lengths: NDArray[np.int64]
) -> tuple[NDArray[np.uint64], NDArray[np.int64]]:
    """Returns a number for each bag that is not empty, equal for equal bags, and their lengths.

    Different bags have different numbers but for one in 2^64.
    """
    lengths = lengths[lengths > 0].astype(np.int64)
    if not len(lengths):
        return np.empty(0, np.uint64), lengths
    starts = np.cumsum(lengths) - lengths
    place = np.arange(len(ids)) - np.repeat(starts, lengths)
    mixed = _mixed(_mixed(ids.astype(np.uint64)) + place.astype(np.uint64))
    return np.add.reduceat(mixed, starts) + _mixed(lengths.astype(np.uint64)), lengths


def _mixed(numbers: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Returns splitmix64 of numbers: random bits, the same for the same number."""
    with np.errstate(over="ignore"):
        x = numbers * np.uint64(0x9E3779B97F4A7C15) + np.uint64(0xD1B54A32D192ED03)
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
