"""Generated clicks with a planted model, so that loss and AUC mean something.

Sample i is a pure function of seed and i, whatever the batch size, the number of ranks or the
order of reading.  In each table ids follow a Zipf law; the popular ids are scattered over the
table and may drift: the order of popularity moves on with i.  Each id has a hidden effect and each
dense feature a hidden weight; a click is drawn with the probability that their sum gives.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import gcd
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from fusedrec_torchrec.access.samples import Samples

__all__ = ["BagKind", "SyntheticData", "SyntheticTable", "random_bits"]

BagKind = Literal["fresh", "repeated"]

BLOCK = 8192
# Streams of random numbers of one sample; tables come after them.
DENSE, CLICK, EFFECT = 0, 1, 2
TABLES = 16
# Keys of random numbers have the position in a bag above the number of the sample.
POSITION = np.uint64(1 << 40)


@dataclass(frozen=True, kw_only=True)
class SyntheticTable:
    """Says how the ids of one table are drawn.

    Attributes:
        name: of the table and its feature.
        rows: ids are in [0, rows).
        pooling: mean number of ids in a bag: 1 is always one, less is one or none, more is one
            and a Poisson number of others.
        zipf: exponent of the law of popularity, 0 is uniform.
        drift: ranks of popularity the hot set moves on in 1000 samples.
        bags: whether the ids of a bag are drawn anew for every sample, or follow from its first id,
            so that bags repeat as often as ids do.
    """

    name: str
    rows: int
    pooling: float = 1.0
    zipf: float = 1.1
    drift: float = 0.0
    bags: BagKind = "fresh"


class SyntheticData:
    """Is a ``Source`` whose samples are computed when they are read.

    Args:
        tables: the tables.
        dense_features: number of dense features, normally distributed.
        samples: size of the data set.
        click_rate: about the share of clicks.
        signal: scale of the hidden effects; the best AUC grows with it.
        seed: of the samples and of the planted model.
    """

    def __init__(
        self,
        tables: Sequence[SyntheticTable],
        dense_features: int,
        samples: int,
        click_rate: float = 0.25,
        signal: float = 1.0,
        seed: int = 0,
    ) -> None:
        self._tables = list(tables)
        self._dense_features = dense_features
        self._samples = samples
        # A sigmoid of noisy logits is flatter than a sigmoid; 5/3 is their variance (MacKay 1992).
        flatter = np.sqrt(1 + np.pi / 8 * signal**2 * 5 / 3)
        self._bias = float(np.log(click_rate / (1 - click_rate)) * flatter)
        self._signal = signal
        self._seed = seed
        self._one_hot = all(table.pooling == 1 for table in self._tables)

    @property
    def identity(self) -> dict[str, Any]:
        return {}  # the configuration says it all

    @property
    def samples(self) -> int:
        return self._samples

    @property
    def left_out(self) -> list[str]:
        return []

    @property
    def dense_features(self) -> int:
        return self._dense_features

    @property
    def table_rows(self) -> dict[str, int]:
        return {table.name: table.rows for table in self._tables}

    @property
    def held_out(self) -> int | None:
        return None  # the configuration says how many

    @property
    def features(self) -> dict[str, str]:
        return {table.name: table.name for table in self._tables}

    @property
    def weighted(self) -> bool:
        return False

    @property
    def blocks(self) -> NDArray[np.int64]:
        full, rest = divmod(self._samples, BLOCK)
        return np.array([BLOCK] * full + ([rest] if rest else []), dtype=np.int64)

    def read(self, start: int, stop: int) -> Samples:
        return self._generate(start, stop)[0]

    def click_probability(self, start: int, stop: int) -> NDArray[np.float64]:
        """Returns what the planted model says: no prediction can be better."""
        return self._generate(start, stop)[1]

    def _generate(self, start: int, stop: int) -> tuple[Samples, NDArray[np.float64]]:
        assert 0 <= start < stop <= self._samples, (start, stop)
        numbers = np.arange(start, stop, dtype=np.uint64)
        n = len(numbers)
        dense = self._normal(numbers)
        weights = _symmetric(random_bits(self._seed, EFFECT, np.arange(self._dense_features)))
        scale = 1.0 / np.sqrt(self._dense_features)
        logit = self._bias + self._signal * scale * (dense * weights).sum(axis=1)
        ids, lengths = [], []
        spread = self._signal / np.sqrt(len(self._tables))
        for place, table in enumerate(self._tables):
            stream = TABLES + 4 * place
            drawn, length = self._bags(table, stream, numbers)
            effects = _symmetric(random_bits(self._seed, stream + 2, drawn))
            effects *= 2.0 * spread
            if table.pooling != 1:
                of_sample = np.repeat(np.arange(n), length)
                sums = np.bincount(of_sample, weights=effects, minlength=n)
                effects = sums / np.sqrt(np.maximum(length, 1))
            logit += effects
            ids.append(drawn)
            lengths.append(length)
        probability = 1.0 / (1.0 + np.exp(-logit))
        clicks = _uniform(random_bits(self._seed, CLICK, numbers)) < probability
        samples = Samples(
            dense=dense.astype(np.float32),
            labels=clicks.astype(np.float32),
            ids=np.concatenate(ids),
            lengths=None if self._one_hot else np.stack(lengths).astype(np.int32),
        )
        return samples, probability

    def _normal(self, numbers: NDArray[np.uint64]) -> NDArray[np.float64]:
        """Returns normal numbers, by Box and Muller's way from two uniform ones."""
        keys = numbers[:, None] * np.uint64(self._dense_features) + np.arange(
            self._dense_features, dtype=np.uint64
        )
        first = _uniform(random_bits(self._seed, DENSE, 2 * keys))
        second = _uniform(random_bits(self._seed, DENSE, 2 * keys + np.uint64(1)))
        return np.sqrt(-2.0 * np.log1p(-first)) * np.cos(2.0 * np.pi * second)

    def _bags(
        self, table: SyntheticTable, stream: int, numbers: NDArray[np.uint64]
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Returns the ids of the bags of these samples, bag after bag, and the bags' lengths."""
        repeated = table.bags == "repeated" and table.pooling > 1
        first = self._ids(table, stream + 1, numbers).astype(np.uint64) if repeated else numbers
        length = self._lengths(table, stream, first)
        if table.pooling == 1:
            return self._ids(table, stream + 1, numbers), length
        of_bag = np.repeat(first, length)
        inside = np.arange(len(of_bag)) - np.repeat(np.cumsum(length) - length, length)
        keys = of_bag + inside.astype(np.uint64) * POSITION
        if not repeated:
            return self._ids(table, stream + 1, keys), length
        others = self._ids(replace(table, drift=0.0), stream + 3, keys)  # a bag stays as it is
        return np.where(inside == 0, of_bag.astype(np.int64), others), length

    def _lengths(
        self, table: SyntheticTable, stream: int, numbers: NDArray[np.uint64]
    ) -> NDArray[np.int64]:
        if table.pooling == 1:
            return np.ones(len(numbers), dtype=np.int64)
        uniform = _uniform(random_bits(self._seed, stream, numbers))
        if table.pooling < 1:
            return (uniform < table.pooling).astype(np.int64)
        mean = table.pooling - 1.0
        longest = int(mean + 10 * np.sqrt(mean) + 10)
        k = np.arange(longest)
        log_factorial = np.cumsum(np.log(np.maximum(k, 1)))
        distribution = np.cumsum(np.exp(k * np.log(mean) - mean - log_factorial))
        return 1 + np.searchsorted(distribution, uniform).clip(0, longest)

    def _ids(
        self, table: SyntheticTable, stream: int, keys: NDArray[np.uint64]
    ) -> NDArray[np.int64]:
        """Returns ids by inverting the distribution of the continuous Zipf law on [1, rows + 1)."""
        uniform = _uniform(random_bits(self._seed, stream, keys))
        if abs(table.zipf - 1.0) < 1e-9:
            popularity = np.exp(uniform * np.log(table.rows + 1.0))
        else:
            power = 1.0 - table.zipf
            uniform *= (table.rows + 1.0) ** power - 1.0
            uniform += 1.0
            popularity = np.power(uniform, 1.0 / power, out=uniform)
        rank = popularity.astype(np.int64)
        rank -= 1
        np.clip(rank, 0, table.rows - 1, out=rank)
        if table.drift:
            number = (keys & (POSITION - np.uint64(1))).astype(np.float64)
            rank += (number * (table.drift / 1000.0)).astype(np.int64)
            rank %= table.rows
        rank *= _scatter(table.rows)
        rank %= table.rows
        return rank


def _scatter(rows: int) -> int:
    """Returns a factor without common divisor with ``rows``: rank * factor visits every row."""
    factor = max(int(rows * 0.6180339887), 1)
    while gcd(factor, rows) != 1:
        factor += 1
    return factor


def random_bits(seed: int, stream: int, keys: NDArray[np.generic]) -> NDArray[np.uint64]:
    """Returns splitmix64 of the keys: random bits, independent for each seed, stream and key."""
    start = (seed * 0x9E3779B97F4A7C15 + stream * 0xD1B54A32D192ED03) & ((1 << 64) - 1)
    with np.errstate(over="ignore"):
        x = keys.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15) + np.uint64(start)
        x ^= x >> np.uint64(30)
        x *= np.uint64(0xBF58476D1CE4E5B9)
        x ^= x >> np.uint64(27)
        x *= np.uint64(0x94D049BB133111EB)
        x ^= x >> np.uint64(31)
    return x


def _uniform(bits: NDArray[np.uint64]) -> NDArray[np.float64]:
    """Returns numbers in [0, 1)."""
    uniform = (bits >> np.uint64(11)).astype(np.float64)
    uniform *= 1.0 / (1 << 53)
    return uniform


def _symmetric(bits: NDArray[np.uint64]) -> NDArray[np.float64]:
    """Returns numbers in [-1, 1)."""
    uniform = _uniform(bits)
    uniform *= 2.0
    uniform -= 1.0
    return uniform
