"""Training with faults: data that has bad samples, ranks that hang."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from fusedrec_torchrec.config import from_mapping
from fusedrec_torchrec.data.samples import Samples
from fusedrec_torchrec.training.config import TrainConfig
from fusedrec_torchrec.training.loop import Training
from fusedrec_torchrec.training.source import open_source
from tests.training.runs import CPU, whole_state

KINDS = ("nan", "inf", "id", "negative", "label", "gradient")


@dataclass
class FaultySource:
    """A source, some of whose samples are bad.

    Attributes:
        source: the good one.
        faults: kind of fault by number of the sample.
    """

    source: Any
    faults: dict[int, str] = field(default_factory=dict)

    def __getattr__(self, name: str) -> Any:
        if name == "source":  # not there yet, when a copy is made
            raise AttributeError(name)
        return getattr(self.source, name)

    def read(self, start: int, stop: int) -> Samples:
        found = self.source.read(start, stop)
        bad = {n - start: kind for n, kind in self.faults.items() if start <= n < stop}
        if not bad:
            return found
        dense, labels, ids = found.dense.copy(), found.labels.astype(np.float32), found.ids.copy()
        first = found.lengths[0] if found.lengths is not None else np.ones(len(labels), np.int32)
        for place, kind in bad.items():
            if kind in ("nan", "inf"):
                dense[place, 0] = float(kind)
            elif kind == "gradient":
                # Numbers, but what becomes of them is not; whatever the sign, one label is wrong.
                dense[place - 1 : place + 1] = 1e37
                labels[place - 1 : place + 1] = (0, 1)
            elif kind == "label":
                labels[place] = float("nan")
            else:
                ids[int(first[:place].sum())] = -1 if kind == "negative" else 10**9
        return Samples(dense, labels, ids, found.lengths)


def train_faulty(
    data: dict[str, Any], faults: dict[int, str], resume: str | None = None
) -> dict[str, Any]:
    """Runs a configuration on this rank, on bad data."""
    config = from_mapping(TrainConfig, data)
    source = FaultySource(open_source(config), faults)
    path = Path(resume) if resume else None
    try:
        training = Training(config, source, CPU, path)  # type: ignore[arg-type]
        result = training.run()
    except ValueError as error:
        return {"error": str(error)}
    return {
        "result": result,
        "state": whole_state(training),
        "skipped": training._bad_batches.skipped,
    }
