"""Whether fusing a table pays, and who pools it, where nothing is known of links and rates.

The prices are those of ``step``, whoever asks.  Where a cluster is known, ``search.assign``
compares the seconds of all shardings; TorchRec's search compares what its estimators make of them;
and where nothing is known, the rows that travel decide.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache

from fusedrec_torchrec.access.row_classes import RowClasses
from fusedrec_torchrec.planner.cost.step import Step, fused_step, stock_step
from fusedrec_torchrec.planner.cost.table_load import TableLoad

__all__ = ["fusing_pays", "likely_load", "who_pools"]

# If the requester pools, the distinct rows of a batch travel; stock shardings pool at the owner and
# send a row for each bag.  Measured, 2 ranks on loopback: fused is faster up to about 1.8 distinct
# rows for a bag (docs/performance.md, benchmarks/crossover.yaml).  On slow links only bytes count,
# hence 1.
MOST_ROWS_PER_OUTPUT = 1.0
# Measured, MLPerf's shape, 2 ranks on loopback: a module of both kinds takes 1.07 to 1.1 times as
# long as one whose owners pool all tables, at the same number of rows.  Where nobody has counted
# bags, this model takes them for ones that never repeat, and the data of recommendation models does
# repeat them: of MLPerf's, a third are distinct in a batch of 1024, less in larger ones, as those
# of RecD are.  So owners pool all unless more than three times as many rows would travel then if
# bags never repeated.
MOST_MORE_ROWS = 3.0
MOST_MORE_COUNTED_ROWS = 1.005
RANKS = 2  # rows that are sent grow alike with them
ASSUMED_ZIPF = 1.05  # of ids that nobody has counted


def fusing_pays(table: TableLoad, batch: int) -> bool:
    """Returns whether no more rows of a table travel if its requesters pool than if table-wise.

    Args:
        table: to be sharded, by rows or in a stock way.
        batch: samples of a rank.
    """
    fused = _bytes_of_rows(fused_step([table], batch, RANKS))
    stock = _bytes_of_rows(stock_step("table_wise", [table], batch, RANKS))
    return fused <= MOST_ROWS_PER_OUTPUT * stock


def who_pools(tables: Sequence[TableLoad], batch: int, rows_known: bool = False) -> list[bool]:
    """Returns for each fused table of a module whether its owner pools.

    Where owners pool some tables, they pool all, unless more rows would travel then: to have both
    kinds in a module costs a second pass over the output.  It takes many more rows unless the bags
    of all tables were counted: that bags do not repeat is only an assumption then, and where they
    do, owners have even less to send.

    Args:
        tables: of one module.
        batch: samples of a rank.
        rows_known: whether somebody knows how often rows come; if not, a Zipf law is assumed.
    """
    likely = list(tables)
    if not rows_known:
        likely = [likely_load(table) for table in tables]
    owned = [table.pooled and table.has_fewer_bags(batch) for table in likely]
    if not any(owned):
        return owned
    bags = [table.distinct_bags(batch).bags if table.pooled else 0.0 for table in likely]
    rows = [table.unique(batch) for table in likely]
    fewest = sum(min(pair) for pair in zip(bags, rows, strict=True))
    counted = all(table.bags_are_counted for table in tables if table.pooled)
    if sum(bags) <= (MOST_MORE_COUNTED_ROWS if counted else MOST_MORE_ROWS) * fewest:
        return [table.pooled for table in tables]
    return [table.pooled and not table.has_more_bags(batch) for table in likely]


def likely_load(table: TableLoad) -> TableLoad:
    """Returns what is likely asked of a table if nobody knows how often its rows come."""
    return replace(table, classes=_likely(table.rows))


@lru_cache(maxsize=1 << 10)
def _likely(rows: int) -> RowClasses:
    return RowClasses.zipf(rows, ASSUMED_ZIPF)


def _bytes_of_rows(step: Step) -> float:
    return sum(stage.bytes_sent for stage in step.stages if stage.name == "rows")
