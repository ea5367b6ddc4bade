"""Whether fusing a table pays.

The prices are those of ``step``, whoever asks.  Where a cluster is known, ``search.assign``
compares the seconds of fused and stock steps; TorchRec's search compares what its estimators make
of them; and where nothing is known of links and rates, bytes decide.
"""

from fusedrec_torchrec.planner.cost.step import Step, fused_step, stock_step
from fusedrec_torchrec.planner.cost.table_load import TableLoad

__all__ = ["fusing_pays"]

# Fused, the distinct rows of a batch travel; stock shardings pool at the owner and send a row for
# each bag.  Measured, 2 ranks on loopback: fused is faster up to about 1.8 distinct rows for a bag
# (docs/performance.md, benchmarks/crossover.yaml).  On slow links only bytes count, hence 1.
MOST_ROWS_PER_OUTPUT = 1.0
RANKS = 2  # rows that are sent grow alike with them


def fusing_pays(table: TableLoad, batch: int) -> bool:
    """Returns whether no more rows of a table travel if it is fused than if it is table-wise.

    Args:
        table: to be sharded.
        batch: samples of a rank.
    """
    fused = _bytes_of_rows(fused_step([table], batch, RANKS))
    stock = _bytes_of_rows(stock_step("table_wise", [table], batch, RANKS))
    return fused <= MOST_ROWS_PER_OUTPUT * stock


def _bytes_of_rows(step: Step) -> float:
    return sum(stage.bytes_sent for stage in step.stages if stage.name == "rows")
