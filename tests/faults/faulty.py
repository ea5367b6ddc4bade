"""Training on data that has bad samples."""

from pathlib import Path
from typing import Any

from fusedrec_torchrec.core.config import from_mapping
from fusedrec_torchrec.training.config import TrainConfig
from fusedrec_torchrec.training.data.faulty import FaultySource
from fusedrec_torchrec.training.loop import Training
from fusedrec_torchrec.training.source import open_source
from tests.training.runs import CPU, whole_state


def train_faulty(
    data: dict[str, Any], faults: dict[int, str], resume: str | None = None
) -> dict[str, Any]:
    """Runs a configuration on this rank, on bad data."""
    config = from_mapping(TrainConfig, data)
    source = FaultySource(open_source(config), faults)
    path = Path(resume) if resume else None
    try:
        training = Training(config, source, CPU, path)
        result = training.run()
    except ValueError as error:
        return {"error": str(error)}
    return {
        "result": result,
        "state": whole_state(training),
        "skipped": training._bad_batches.skipped,
    }
