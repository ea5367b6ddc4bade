"""Ranks that read different configurations or data do not train."""

from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from fusedrec_torchrec.core.config import from_mapping, with_overrides
from fusedrec_torchrec.training.config import TrainConfig
from fusedrec_torchrec.training.loop import Training
from fusedrec_torchrec.training.source import open_source
from tests.cluster import Cluster
from tests.training.runs import CPU, small


def error_with(data: dict[str, Any], override: str) -> str:
    """Rank 1 has another setting."""
    overrides = [override] if dist.get_rank() == 1 else []
    config = from_mapping(TrainConfig, with_overrides(data, overrides))
    try:
        Training(config, open_source(config), CPU, None)
    except ValueError as error:
        return str(error)
    return "no error"


@pytest.mark.parametrize(
    ("override", "named"),
    [
        ("optimizer.dense.learning_rate=0.5", "optimizer.dense.learning_rate is 0.001 on rank 0"),
        ("data.batch_size=256", "data.batch_size is 128 on rank 0 and 256 on rank 1"),
        ("data.seed=7", "data.seed is 0 on rank 0 and 7 on rank 1"),
        ("steps=4", "steps is 24 on rank 0 and 4 on rank 1"),
        ("logging.log_every=7", "logging.log_every is 5 on rank 0 and 7 on rank 1"),
        ("sharding.grid.sharding_group_size=1", "sharding.grid.sharding_group_size is not given"),
    ],
)
def test_what_differs_is_named_on_all_ranks(
    cluster_2: Cluster, tmp_path: Path, override: str, named: str
) -> None:
    errors = cluster_2.run(error_with, small(tmp_path), override)
    assert errors[0] == errors[1]
    assert errors[0].startswith("ranks do not agree about the configuration: ")
    assert named in errors[0]


@pytest.mark.parametrize("override", ["launch.threads=2", "logging.directory=elsewhere"])
def test_machines_may_differ_in_what_is_theirs(
    cluster_2: Cluster, tmp_path: Path, override: str
) -> None:
    assert cluster_2.run(error_with, small(tmp_path), override) == ["no error"] * 2
