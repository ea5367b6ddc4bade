"""How often the rows of a table are used, and how many of them a batch meets.

Everything the cost model wants to know about data is in here.  Rows are in classes of equal use, so
that a table of a billion rows is a few hundred numbers.  Where uses come from:

- nothing is known: all rows alike, the worst case for dedup;
- a Zipf exponent: the law of ``access.synthetic``;
- an access profile: what was counted.  Rows that a sample has not met are not rows that are never
  used; Good and Turing's estimate gives them the share of accesses that went to rows met once.
"""

from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np
from numpy.typing import NDArray

from fusedrec_torchrec.access.access_profile import AccessProfile
from fusedrec_torchrec.access.replication import chance_in_batch

__all__ = ["RowClasses", "RowPlaces"]

ALONE = 4096  # the most used rows have classes of their own
CLASSES_PER_OCTAVE = 32
MOST_ADJUSTED, FEWEST_ROWS = 10, 20
Floats = NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class RowClasses:
    """Holds the rows of a table in C classes of equal use, the most used class first.

    Attributes:
        rows_C: rows of each class.
        shares_C: share of the table's accesses that one row of the class gets.
    """

    rows_C: Floats
    shares_C: Floats

    @property
    def rows(self) -> float:
        """How many rows there are."""
        return float(self.rows_C.sum())

    @staticmethod
    def uniform(rows: int) -> "RowClasses":
        """Returns the classes of a table whose rows are all used alike."""
        return RowClasses(np.array([float(rows)]), np.array([1.0 / max(rows, 1)]))

    @staticmethod
    def zipf(rows: int, exponent: float) -> "RowClasses":
        """Returns the classes of Zipf's law, continuous, as ``access.synthetic`` draws from it."""
        edges = np.unique(
            np.concatenate(
                [
                    np.arange(1, min(ALONE, rows) + 1),
                    np.floor(np.geomspace(min(ALONE, rows), rows + 1, _octaves(rows))),
                    [rows + 1],
                ]
            )
        ).astype(np.float64)
        if abs(exponent - 1.0) < 1e-9:
            below = np.log(edges) / np.log(rows + 1.0)
        else:
            power = 1.0 - exponent
            below = (edges**power - 1.0) / ((rows + 1.0) ** power - 1.0)
        rows_C = np.diff(edges)
        return RowClasses(rows_C, np.diff(below) / rows_C)

    @staticmethod
    def counted(profile: AccessProfile, table: str) -> "RowClasses":
        """Returns the classes that an access profile has counted."""
        rows, accesses = profile.table_rows[table], profile.accesses[table]
        counts = profile.counts[table]
        if not accesses or not rows:
            return RowClasses.uniform(rows)
        values, rows_C = np.unique(counts, return_counts=True)
        shares_C = _adjusted(profile, values, rows_C) / accesses
        unlisted = rows - int(rows_C.sum())
        rest = max(1.0 - float((shares_C * rows_C).sum()), 0.0)  # of rows that were not kept
        if unlisted > 0:
            rows_C = np.append(rows_C[::-1], unlisted)
            shares_C = np.append(shares_C[::-1], rest / unlisted)
        else:
            rows_C, shares_C = rows_C[::-1], shares_C[::-1] / max(1.0 - rest, 1e-12)
        return RowClasses(rows_C.astype(np.float64), shares_C)

    def met(self, ids: float) -> Floats:
        """Returns, for each class, the probability that ``ids`` accesses meet one of its rows."""
        return chance_in_batch(self.shares_C, ids)

    def unique(self, ids: float) -> float:
        """Returns the distinct rows among ``ids`` accesses: the sum of 1 - (1 - p)^ids."""
        return float((self.rows_C * self.met(ids)).sum())

    def without(self, hot: float) -> "RowClasses":
        """Returns all but the ``hot`` most used rows; shares are still of all accesses."""
        before = np.concatenate([[0.0], np.cumsum(self.rows_C)])
        left = np.clip(before[1:] - hot, 0.0, self.rows_C)
        keep = left > 0
        return RowClasses(left[keep], self.shares_C[keep])

    def drawn_once(self, ids: float, accesses: int) -> "RowClasses":
        """Returns the classes for batches of ``ids`` out of data with ``accesses`` in all.

        An epoch draws every access once, so a row that the data has c times is missing in a batch
        with probability (1 - ids / accesses)^c.  Only small data can tell the difference.
        """
        return RowClasses(self.rows_C, _drawn_once(self.shares_C, ids, accesses))

    def coverage(self, hot: float) -> float:
        """Returns the share of the accesses that the ``hot`` most used rows take."""
        ends_C1, uses_C1 = self._summed
        return max(1.0 - float(uses_C1[-1]) + float(np.interp(hot, ends_C1, uses_C1)), 0.0)

    @cached_property
    def _summed(self) -> tuple[Floats, Floats]:
        """Rows before each class and their share of the accesses, and those of all classes."""
        uses_C = self.rows_C * self.shares_C
        ends_C1, uses_C1 = (np.append(0.0, np.cumsum(of_C)) for of_C in (self.rows_C, uses_C))
        return ends_C1, uses_C1


@dataclass(frozen=True, eq=False)
class RowPlaces:
    """Says where in a table the used rows are, as an access profile knows them.

    Attributes:
        rows: of the table.
        ids_R: rows that were counted, ascending.
        shares_R: share of the table's accesses that each of them gets.
        rest: that each of the others gets.
    """

    rows: int
    ids_R: NDArray[np.int64]
    shares_R: Floats
    rest: float

    @staticmethod
    def counted(profile: AccessProfile, table: str) -> "RowPlaces":
        """Returns the places that an access profile has counted."""
        rows, accesses = profile.table_rows[table], max(profile.accesses[table], 1)
        order = np.argsort(profile.ids[table], kind="stable")
        values, rows_C = np.unique(profile.counts[table], return_counts=True)
        adjusted = _adjusted(profile, values, rows_C) / accesses
        shares = adjusted[np.searchsorted(values, profile.counts[table][order])]
        ids = profile.ids[table][order]
        rest = max(1.0 - float(shares.sum()), 0.0) / max(rows - len(ids), 1)
        return RowPlaces(rows, ids, shares, rest)

    def drawn_once(self, ids: float, accesses: int) -> "RowPlaces":
        """Returns the places for batches out of small data, as ``RowClasses.drawn_once`` does."""
        shares = _drawn_once(self.shares_R, ids, accesses)
        rest = float(_drawn_once(np.array([self.rest]), ids, accesses)[0])
        return RowPlaces(self.rows, self.ids_R, shares, rest)

    def without(self, hot: NDArray[np.int64]) -> "RowPlaces":
        """Returns the places without rows that are not asked of their owners."""
        shares = np.where(np.isin(self.ids_R, hot), 0.0, self.shares_R)
        return RowPlaces(self.rows, self.ids_R, shares, self.rest)

    def before(self, edges: NDArray[np.int64], ids: float | None) -> Floats:
        """Returns how much of a batch is asked of the rows before each edge.

        Args:
            edges: numbers of rows.
            ids: of the batch: distinct rows are counted; if None, accesses are, as shares of all.
        """
        sums, rest = _sums(self, ids)
        listed = np.searchsorted(self.ids_R, edges, side="left")
        return np.asarray(sums[listed] + (edges - listed) * rest)

    def edges(self, wanted: Floats, ids: float) -> NDArray[np.int64]:
        """Returns the rows before which the distinct rows of a batch reach ``wanted``."""
        knots, before = _knots(self, ids)
        rows = np.interp(wanted, before, knots)
        return np.clip(np.rint(rows).astype(np.int64), 0, self.rows)


@lru_cache(maxsize=1 << 10)
def _sums(places: RowPlaces, ids: float | None) -> tuple[Floats, float]:
    """Returns what is asked of the first 0, 1, 2, ... counted rows, and of every other row."""
    if ids is None:
        return np.concatenate([[0.0], np.cumsum(places.shares_R)]), places.rest
    listed = chance_in_batch(places.shares_R, ids)
    rest = float(chance_in_batch(np.array([places.rest]), ids)[0])
    return np.concatenate([[0.0], np.cumsum(listed)]), rest


@lru_cache(maxsize=1 << 10)
def _knots(places: RowPlaces, ids: float) -> tuple[NDArray[np.int64], Floats]:
    """Returns rows between which all rows are alike, and what is asked of those before."""
    knots = np.unique(np.concatenate([places.ids_R, places.ids_R + 1, [0, places.rows]]))
    return knots, places.before(knots, ids)


def _drawn_once(shares: Floats, ids: float, accesses: int) -> Floats:
    """Returns shares that, drawn with replacement, meet rows as often as theirs do without."""
    drawn = min(ids / max(accesses, 1), 1 - 1e-12)
    return np.asarray(-np.expm1(shares * accesses / max(ids, 1e-300) * np.log1p(-drawn)))


def _adjusted(profile: AccessProfile, values: NDArray[np.int64], rows: NDArray[np.int64]) -> Floats:
    """Returns the counts, corrected if they are those of a sample."""
    is_sample = profile.samples < profile.of_samples and not profile.error
    return good_turing(values, rows) if is_sample else values.astype(np.float64)


def good_turing(values: NDArray[np.int64], rows: NDArray[np.int64]) -> Floats:
    """Returns the counts of a sample, corrected for the luck of having been met.

    A row that was met r times has (r + 1) n(r + 1) / n(r) accesses in the mean, where n(r) rows
    were met r times.  Only small counts need it, and only where many rows have them.

    Args:
        values: counts, ascending.
        rows: how many rows have each of them.
    """
    adjusted = values.astype(np.float64)
    of_count = dict(zip(values.tolist(), rows.tolist(), strict=True))
    for place, count in enumerate(values.tolist()):
        here, above = of_count[count], of_count.get(count + 1, 0)
        if count > MOST_ADJUSTED or min(here, above) < FEWEST_ROWS:
            break
        adjusted[place] = min((count + 1) * above / here, count)
    return np.maximum.accumulate(adjusted)


def _octaves(rows: int) -> int:
    return max(int(np.log2(max(rows / ALONE, 1.0)) * CLASSES_PER_OCTAVE) + 2, 2)
