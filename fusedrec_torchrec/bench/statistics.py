"""Computes medians of paired ratios, with intervals.

Timings on shared machines drift; two systems that ran one after the other drifted alike.  So a
comparison is the median of the ratios of neighbours, and its interval comes from resampling them.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

__all__ = ["Ratio", "paired_ratio"]

RESAMPLES = 2000
COVERAGE = 0.95


@dataclass(frozen=True)
class Ratio:
    """Is a median of paired ratios, and the interval that holds it with 95 % (bootstrap)."""

    median: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.median:.2f} [{self.low:.2f}, {self.high:.2f}]"


def paired_ratio(numerators: Sequence[float], denominators: Sequence[float]) -> Ratio:
    """Returns the median of ``numerators[i] / denominators[i]``, and its interval."""
    ratios = np.asarray(numerators, dtype=float) / np.asarray(denominators, dtype=float)
    picks = np.random.default_rng(0).integers(len(ratios), size=(RESAMPLES, len(ratios)))
    medians = np.median(ratios[picks], axis=1)
    tail = (1 - COVERAGE) / 2
    low, high = np.quantile(medians, [tail, 1 - tail])
    return Ratio(float(np.median(ratios)), float(low), float(high))
