"""How many distinct bags a batch has by chance, where nobody has counted them.

All that is known is how often rows are used; ids of a bag are drawn one by one, as
``access.synthetic`` draws them.  Bags of one id are then as distinct as rows, and long ones all
differ, unless a table has very few rows.  Bags that repeat for other reasons are known from an
access profile only (``bag_counts``).
"""

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from fusedrec_torchrec.access.bag_counts import DistinctBags
from fusedrec_torchrec.access.replication import chance_in_batch
from fusedrec_torchrec.access.row_classes import RowClasses

__all__ = ["BagsByChance"]

BINS = 8  # of the logarithm of a bag's probability, for each halving
RAREST = 48 * BINS  # bags that are less likely than 2^-48 do not come twice
LONGEST = 256  # ids of a bag, beyond which all are taken to be so long
Floats = NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class BagsByChance:
    """Are bags whose ids are drawn independently of each other.

    Attributes:
        classes: how often rows are used.
        length: ids of a bag, in the mean; below 1 a bag has one id or none.
        bags: bags of a sample.
        scattered: whether longer bags have one id and a Poisson number of others, as generated data
            has; if not, lengths are as equal as whole numbers can be.
    """

    classes: RowClasses
    length: float
    bags: float = 1.0
    scattered: bool = False

    @property
    def full(self) -> float:
        """How many bags of a sample are not empty."""
        return self.bags * min(self.length, 1.0)

    def distinct(self, samples: float) -> DistinctBags:
        """Returns the distinct bags of a batch."""
        drawn = samples * self.bags
        if drawn <= 0 or self.length <= 0:
            return DistinctBags(0.0, 0.0)
        bags = ids = 0.0
        for length, share in self._lengths():
            distinct = _distinct(self.classes, min(length, LONGEST), drawn * share)
            bags, ids = bags + distinct, ids + length * distinct
        return DistinctBags(bags, ids)

    def _lengths(self) -> list[tuple[int, float]]:
        """Returns lengths of bags that are not empty, and how often each of them is."""
        if self.length <= 1:
            return [(1, self.length)]
        if not self.scattered:
            low = int(self.length)
            shares = [(low, low + 1 - self.length), (low + 1, self.length - low)]
            return [(length, share) for length, share in shares if share > 0]
        mean = self.length - 1
        others = np.arange(int(mean + 10 * np.sqrt(mean) + 10))
        log_factorial = np.cumsum(np.log(np.maximum(others, 1)))
        chances = np.exp(others * np.log(mean) - mean - log_factorial)
        return [(1 + k, float(p)) for k, p in zip(others.tolist(), chances, strict=True)]


def _distinct(classes: RowClasses, length: int, drawn: float) -> float:
    """Returns the distinct ones of ``drawn`` bags of some length."""
    if length == 1:
        return min(classes.unique(drawn), drawn)
    shares_B = _shares_of_bags(classes, length)
    chance_B = np.exp2(-np.arange(RAREST) / BINS)
    met_B = chance_in_batch(chance_B, drawn) / chance_B
    return min(float(shares_B[:-1] @ met_B) + drawn * float(shares_B[-1]), drawn)


@lru_cache(maxsize=1 << 12)
def _shares_of_bags(classes: RowClasses, length: int) -> Floats:
    """Returns the share of drawn bags in each bin of probability; the last has all rarer bags.

    The logarithm of a bag's probability is the sum of those of its ids, so that the shares of bags
    of n + 1 ids are a convolution of those of n ids and of one.
    """
    if length > 1:
        half = length // 2
        first, second = (_shares_of_bags(classes, n) for n in (half, length - half))
        both = np.convolve(first[:-1], second[:-1])
        shares = np.append(both[:RAREST], 0.0)
        shares[-1] = max(1.0 - float(shares.sum()), 0.0)
        return shares
    mass = classes.rows_C * classes.shares_C
    place = np.clip(-np.log2(np.clip(classes.shares_C, 1e-300, 1.0)) * BINS, 0, RAREST)
    low = np.minimum(place.astype(np.int64), RAREST - 1)
    upper = place - low
    shares = np.zeros(RAREST + 1)
    np.add.at(shares, low, mass * (1 - upper))
    np.add.at(shares, low + 1, mass * upper)
    return shares / max(float(shares.sum()), 1e-300)
