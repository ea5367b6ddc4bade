"""Ranks that a table can have as owners of all its rows: one of a whole table, some of columns."""

from collections.abc import Iterator
from functools import lru_cache

from fusedrec_torchrec.planner.cost.table_load import TableLoad
from fusedrec_torchrec.sharding.sharding_type import (
    FUSED,
    FUSED_COLUMN_WISE,
    FUSED_TABLE_WISE,
    FUSED_TYPES,
)

__all__ = ["ALL_RANKS", "FUSED_MIXED", "WHOLE", "column_splits", "neighbours", "owners_in_turn"]

TABLE_WISE = "table_wise"
WHOLE = (TABLE_WISE, FUSED_TABLE_WISE)  # on one rank
FUSED_MIXED = "fused_mixed"  # the fused shardings by turns, table by table
ALL_RANKS = 16  # up to so many are tried for a table, else the least loaded ones
FEW_RANKS = 4  # where columns may begin at every rank
FEWEST_COLUMNS = 4  # of a shard, and what its columns must be a multiple of


@lru_cache(maxsize=1 << 10)
def column_splits(dim: int, ranks: int) -> tuple[int, ...]:
    """Returns over how many ranks the columns of a fused table can be split, the fewest first.

    Every halving is looked at, and all ranks.
    """
    halvings = {2**n for n in range(1, 32) if 2**n <= ranks} | {ranks}
    return tuple(n for n in sorted(halvings) if n > 1 and dim % (FEWEST_COLUMNS * n) == 0)


def neighbours(system: str, table: TableLoad, ranks: int) -> Iterator[tuple[int, ...]]:
    """Yields owners of a table that are ranks next to each other; none for other shardings."""
    if system in WHOLE:
        yield from ((rank,) for rank in range(ranks if ranks <= ALL_RANKS else 1))
    elif system == FUSED_COLUMN_WISE:
        for split in column_splits(table.dim, ranks):
            last = ranks - split if ranks <= ALL_RANKS else 0
            stride = 1 if ranks <= FEW_RANKS else split
            yield from (tuple(range(r, r + split)) for r in range(0, last + 1, stride))
    else:
        yield ()


def owners_in_turn(system: str, table: int, dim: int, ranks: int) -> tuple[int, ...]:
    """Returns the ranks that pool a fused table, where tables are dealt to ranks in turn.

    Columns are split over as many ranks as can be, and no rank pools where requesters do.

    Args:
        system: a fused sharding, or ``FUSED_MIXED``.
        table: its number.
        dim: its columns.
        ranks: over which tables are sharded.
    """
    if system == FUSED_MIXED:
        turn, kind = divmod(table, len(FUSED_TYPES))
        return owners_in_turn(FUSED_TYPES[kind], turn, dim, ranks)
    if system == FUSED:
        return ()
    splits = column_splits(dim, ranks) if system == FUSED_COLUMN_WISE else ()
    return tuple(range(max(splits))) if splits else (table % ranks,)
