"""What a model asks of a table: the cost model's and the planner's view of it."""

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from fusedrec_torchrec.access.bag_counts import CountedBags, DistinctBags
from fusedrec_torchrec.access.distinct_bags import BagsByChance
from fusedrec_torchrec.access.row_classes import RowClasses, RowPlaces

__all__ = ["NUMBER_BYTES", "TableLoad", "even_ranges"]

NUMBER_BYTES = 4
Floats = NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class TableLoad:
    """Says what a model asks of a table.

    Attributes:
        name: of the table.
        rows, dim: of the table.
        pooling: ids of a sample, of all features of the table together.
        classes: how often rows are used.
        bags: bags of a sample: features of the table.
        pooled: whether a bag becomes one row of output, or every id one.
        places: where the used rows are; None if popular ones are anywhere.
        element_bytes: of a weight.
        state_bytes: of a row's optimizer state.
        kind: tables of one kind make a bucket.
        can_be_hot: whether the optimizer can keep replicas equal.
        bag_use: how many of its bags are distinct; by chance, if None.
        weighted: whether every id of a bag has a weight.
        can_be_owned: whether its owner may pool it, if it is fused and pooled.
    """

    name: str
    rows: int
    dim: int
    pooling: float
    classes: RowClasses
    bags: float = 1
    pooled: bool = True
    places: RowPlaces | None = None
    element_bytes: int = NUMBER_BYTES
    state_bytes: int = NUMBER_BYTES
    kind: str = ""
    can_be_hot: bool = True
    bag_use: BagsByChance | CountedBags | None = None
    weighted: bool = False
    can_be_owned: bool = True

    def ids(self, batch: int) -> float:
        """Returns how many ids of the table a batch has."""
        return batch * self.pooling

    def unique(self, batch: float, hot: int = 0) -> float:
        """Returns the distinct rows of a batch that are not among the ``hot`` most used ones."""
        return _unique(self.classes, batch * self.pooling, hot)

    def distinct_bags(self, batch: float) -> DistinctBags:
        """Returns the distinct bags of a batch that are not empty, and the ids in them."""
        return _distinct_bags(self._bag_use, batch)

    def has_fewer_bags(self, batch: float) -> bool:
        """Returns whether a batch has fewer distinct bags than distinct rows."""
        return self.distinct_bags(batch).bags < (1 - 1e-9) * self.unique(batch)

    def has_more_bags(self, batch: float) -> bool:
        """Returns whether a batch has more distinct bags than distinct rows."""
        return self.distinct_bags(batch).bags > (1 + 1e-9) * self.unique(batch)

    def full_bags(self, batch: float) -> float:
        """Returns the bags of a batch that are not empty."""
        return self._bag_use.full * batch

    @property
    def bags_are_counted(self) -> bool:
        """Whether somebody has counted which bags repeat.

        A law of rows does not know it, unless rows were counted and no bag has more than one.  Nor
        do samples that are too few for a batch of any size.
        """
        if isinstance(self.bag_use, CountedBags):
            return len(self.bag_use.samples_K) > 0
        return self.places is not None and self.pooling <= self.bags

    @property
    def _bag_use(self) -> BagsByChance | CountedBags:
        return self.bag_use or _by_chance(self.classes, self.pooling, self.bags)

    @property
    def outputs(self) -> float:
        """How many rows of output a sample has."""
        return self.bags if self.pooled else self.pooling

    @property
    def row_bytes(self) -> int:
        """Bytes of a row at its owner, with the optimizer's state."""
        return self.dim * self.element_bytes + self.state_bytes

    @property
    def size(self) -> int:
        """Bytes of the table, with the optimizer's state."""
        return self.rows * self.row_bytes

    def share(self, ranges: NDArray[np.int64], batch: int, hot: NDArray[np.int64]) -> Floats:
        """Returns the share of each range in the distinct rows that a batch asks for.

        Args:
            ranges: where they begin, and the end of the last one.
            batch: samples of a rank.
            hot: rows that are not asked for.
        """
        if self.places is None:
            return np.asarray(np.diff(ranges) / max(self.rows, 1), dtype=np.float64)
        places = self.places.without(hot) if len(hot) else self.places
        met = np.diff(places.before(ranges, self.ids(batch)))
        return np.asarray(met / max(met.sum(), 1e-300))

    def even_share(self, ranks: int, batch: int) -> Floats:
        """Returns the same for ranges as TorchRec makes them."""
        return _even_share(self, ranks, batch)

    def access_share(self, ranges: NDArray[np.int64]) -> Floats:
        """Returns the share of each range in all accesses."""
        if self.places is None:
            return np.asarray(np.diff(ranges) / max(self.rows, 1), dtype=np.float64)
        return np.diff(self.places.before(ranges, None))


@lru_cache(maxsize=1 << 16)
def _unique(classes: RowClasses, ids: float, hot: int) -> float:
    return (classes.without(hot) if hot else classes).unique(ids)


@lru_cache(maxsize=1 << 14)
def _by_chance(classes: RowClasses, pooling: float, bags: float) -> BagsByChance:
    return BagsByChance(classes, pooling / bags if bags else 0.0, bags)


@lru_cache(maxsize=1 << 16)
def _distinct_bags(use: BagsByChance | CountedBags, batch: float) -> DistinctBags:
    return use.distinct(batch)


@lru_cache(maxsize=1 << 12)
def _even_share(table: TableLoad, ranks: int, batch: int) -> Floats:
    return table.share(even_ranges(table.rows, ranks), batch, np.empty(0, np.int64))


def even_ranges(rows: int, ranks: int) -> NDArray[np.int64]:
    """Returns where each rank's rows begin, as TorchRec splits a table."""
    block = -(-rows // ranks)
    return np.minimum(block * np.arange(ranks + 1, dtype=np.int64), rows)
