"""Runs a rank of ``soak.py``: training as usual, on data with bad samples now and then."""

from typing import Any
from unittest import mock

from fusedrec_torchrec.training import main as training
from fusedrec_torchrec.training.data.faulty import FaultySource
from fusedrec_torchrec.training.source import open_source

ONE_IN = 600_000  # samples


def faulty(*arguments: Any) -> FaultySource:
    return FaultySource(open_source(*arguments), one_in=ONE_IN)


if __name__ == "__main__":
    with mock.patch.object(training, "open_source", faulty):
        training.main()
