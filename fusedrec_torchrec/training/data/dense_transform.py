"""Makes numbers of dense columns fit for a model."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["Scale", "log_of"]


def log_of(values: NDArray[Any]) -> NDArray[np.float64]:
    """Returns log(x + 3) with x no less than -2, as ``torchrec.datasets.criteo`` does."""
    return np.log(np.maximum(values, -2) + 3.0)


@dataclass(frozen=True)
class Scale:
    """Standardizes the numbers of a column.

    Attributes:
        mean: of the numbers that are not missing.
        deviation: their standard deviation; 1 where all are alike.
    """

    mean: float
    deviation: float

    @classmethod
    def of(cls, blocks: Iterable[NDArray[np.float64]]) -> "Scale":
        """Returns the scale of a column, from its numbers that are not missing, block by block."""
        count, mean, squares = 0, 0.0, 0.0
        for block in blocks:
            if not len(block):
                continue
            # Chan's way to put blocks together: sums of squares would lose the digits of large
            # numbers that differ by little, as times do.
            own = float(block.mean())
            total = count + len(block)
            squares += float(((block - own) ** 2).sum())
            squares += (own - mean) ** 2 * count * len(block) / total
            mean += (own - mean) * len(block) / total
            count = total
        deviation = (squares / max(count, 1)) ** 0.5
        # What is left of rounding is no deviation.
        return cls(mean, deviation if deviation > 1e-12 * max(abs(mean), 1e-300) else 1.0)

    def __call__(self, values: NDArray[np.float64]) -> NDArray[np.float32]:
        """Returns standardized numbers; a missing one (NaN) becomes the mean, which is 0."""
        return np.nan_to_num((values - self.mean) / self.deviation, nan=0.0).astype(np.float32)
