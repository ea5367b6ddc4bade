"""What a batch asks of a table, and whether fusing the table pays.

Nothing is known here of the access distribution: ids are taken to be uniform over a table's rows,
which is the worst case for dedup.  N ids of a table of R rows then meet
``R * (1 - (1 - 1/R)^N)`` distinct rows.
"""

import math

from torchrec.distributed.planner.types import ParameterConstraints, ShardingOption
from torchrec.distributed.planner.utils import get_num_poolings

__all__ = ["TableWorkload", "expected_unique"]

# Fused, the distinct rows of a batch travel; stock shardings pool at the owner and send a row for
# each bag.  Measured, 2 ranks on loopback: fused is faster up to about 1.8 distinct rows for a bag
# (docs/performance.md, benchmarks/crossover.yaml).  On slow links only bytes count, hence 1.
MOST_ROWS_PER_OUTPUT = 1.0


def expected_unique(rows: int, ids: float) -> float:
    """Distinct rows among ``ids`` uniform draws from ``rows`` rows."""
    if rows <= 0 or ids <= 0:
        return 0.0
    return -rows * math.expm1(ids * math.log1p(-1 / rows)) if rows > 1 else 1.0


class TableWorkload:
    """What a batch of one rank asks of a table.

    Attributes:
        rows, dim, element_size: of the table.
        ids: in the batch.
        bags: in the batch.
        output_rows: rows of output: one for each bag, or for each id of a sequence.
        unique: distinct rows among the ids, expected.
    """

    def __init__(
        self, option: ShardingOption, constraints: dict[str, ParameterConstraints] | None
    ) -> None:
        mine = (constraints or {}).get(option.name)
        poolings = get_num_poolings(constraints, option)
        batch_sizes = (mine.batch_sizes if mine else None) or [option.batch_size] * len(poolings)
        self.rows, self.dim = option.tensor.shape
        self.element_size = option.tensor.element_size()
        self.ids = sum(
            length * pooling * batch
            for length, pooling, batch in zip(
                option.input_lengths, poolings, batch_sizes, strict=True
            )
        )
        self.bags = sum(p * b for p, b in zip(poolings, batch_sizes, strict=True))
        self.output_rows = self.bags if option.is_pooled else self.ids
        self.unique = expected_unique(self.rows, self.ids)

    @property
    def pays_fused(self) -> bool:
        """Whether no more rows travel than outputs would."""
        return self.unique <= MOST_ROWS_PER_OUTPUT * self.output_rows
