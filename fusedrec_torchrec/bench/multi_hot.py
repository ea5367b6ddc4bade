"""Makes bags of one-hot data, as MLPerf does for its benchmark of DLRM DCNv2.

Every id of every table has a bag of its own, which is the same whenever the id comes: the id
itself, then rows of the table that were drawn uniformly.  MLPerf's script draws a table of all
bags; here the row at a position is a hash of table, id and position, so that nothing is kept.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fusedrec_torchrec.access.samples import Samples, Source
from fusedrec_torchrec.access.synthetic import random_bits

__all__ = ["MultiHotSource", "fixed_bags"]

POSITION = np.uint64(1 << 40)


def fixed_bags(
    ids: NDArray[np.int64], size: int, rows: int, table: int, seed: int = 0
) -> NDArray[np.int64]:
    """Returns the bags of some ids of one table, [number of ids, size].

    Args:
        ids: which bags.
        size: ids of a bag; the first is the bag's own id.
        rows: of the table, from which the others are drawn uniformly.
        table: number of the table; the bags of an id differ from table to table.
        seed: of all bags.
    """
    keys = ids.astype(np.uint64)[:, None] + np.arange(size, dtype=np.uint64) * POSITION
    bags = (random_bits(seed, table, keys) % np.uint64(rows)).astype(np.int64)
    bags[:, 0] = ids
    return bags


class MultiHotSource:
    """Is a ``Source`` of bags, made of one that has a single id for each sample and feature.

    Args:
        source: the one-hot data.
        sizes: ids of a bag, for each table.
        seed: of the bags.

    Raises:
        ValueError: there are not as many sizes as tables.
    """

    def __init__(self, source: Source, sizes: Sequence[int], seed: int = 0) -> None:
        if len(sizes) != len(source.table_rows):
            raise ValueError(
                f"multi_hot has sizes for {len(sizes)} tables, the data has "
                f"{len(source.table_rows)} tables"
            )
        self._source = source
        self._sizes = list(sizes)
        self._seed = seed

    @property
    def samples(self) -> int:
        return self._source.samples

    @property
    def identity(self) -> dict[str, Any]:
        return {**self._source.identity, "multi_hot": self._sizes, "bags_seed": self._seed}

    @property
    def left_out(self) -> list[str]:
        return self._source.left_out

    @property
    def dense_features(self) -> int:
        return self._source.dense_features

    @property
    def table_rows(self) -> dict[str, int]:
        return self._source.table_rows

    @property
    def held_out(self) -> int | None:
        return self._source.held_out

    @property
    def features(self) -> dict[str, str]:
        return self._source.features

    @property
    def weighted(self) -> bool:
        return False

    @property
    def blocks(self) -> NDArray[np.int64]:
        return self._source.blocks

    def read(self, start: int, stop: int) -> Samples:
        one_hot = self._source.read(start, stop)
        assert one_hot.lengths is None, "the data has bags already"
        n = len(one_hot)
        ids_FN = one_hot.ids.reshape(-1, n)
        bags = [
            fixed_bags(ids_N, size, rows, table, self._seed).ravel()
            for table, (ids_N, size, rows) in enumerate(
                zip(ids_FN, self._sizes, self.table_rows.values(), strict=True)
            )
        ]
        lengths = np.repeat(np.array(self._sizes, dtype=np.int32)[:, None], n, axis=1)
        return Samples(one_hot.dense, one_hot.labels, np.concatenate(bags), lengths)
