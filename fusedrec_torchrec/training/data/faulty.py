"""Puts bad samples into data, for drills: to see what a training makes of them."""

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from fusedrec_torchrec.access.samples import Samples

__all__ = ["KINDS", "FaultySource"]

KINDS = ("nan", "inf", "id", "negative", "label", "gradient")


@dataclass
class FaultySource:
    """Is a source, some of whose samples are bad, the same ones in every reading.

    Attributes:
        source: the good one.
        faults: kind of fault by number of the sample.
        one_in: makes one in so many samples bad, of all kinds; None makes no others.
    """

    source: Any
    faults: dict[int, str] = field(default_factory=dict)
    one_in: int | None = None

    def __getattr__(self, name: str) -> Any:
        if name == "source":  # not there yet, when a copy is made
            raise AttributeError(name)
        return getattr(self.source, name)

    def read(self, start: int, stop: int) -> Samples:
        """Returns samples as the good source does, some of them spoiled."""
        samples = self.source.read(start, stop)
        bad = {n - start: kind for n, kind in self.faults.items() if start <= n < stop}
        if self.one_in is not None:
            numbers = np.arange(start, stop, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
            chosen = (numbers >> np.uint64(20)) % np.uint64(self.one_in) == 0
            bad |= {int(p): KINDS[(start + int(p)) % len(KINDS)] for p in chosen.nonzero()[0]}
        if not bad:
            return samples
        dense, ids = samples.dense.copy(), samples.ids.copy()
        labels, lengths = samples.labels.astype(np.float32), samples.lengths
        first = lengths[0] if lengths is not None else np.ones(len(labels), np.int32)
        for place, kind in bad.items():
            if kind in ("nan", "inf"):
                dense[place, 0] = float(kind)
            elif kind == "gradient":
                # Numbers, but what becomes of them is not; whatever the sign, one label is wrong.
                dense[max(place - 1, 0) : place + 1] = 1e37
                labels[place] = 1
                labels[max(place - 1, 0)] = 0
            elif kind == "label":
                labels[place] = float("nan")
            else:
                at = int(first[:place].sum())
                if at < len(ids):
                    ids[at] = -1 if kind == "negative" else 10**9
        return Samples(dense, labels, ids, lengths, samples.weights)
