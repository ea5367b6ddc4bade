"""What records say about single steps: stages, and the load of every rank."""

from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from torch import nn

from fusedrec_torchrec.compat.lookups import lookups_of
from fusedrec_torchrec.core.collective_counter import CollectiveCounter
from fusedrec_torchrec.core.config import from_mapping
from fusedrec_torchrec.core.stages import StageTimer
from fusedrec_torchrec.training.config import TrainConfig
from fusedrec_torchrec.training.logs import RunLog, read_log
from fusedrec_torchrec.training.loop import Training
from fusedrec_torchrec.training.metrics import ClickSums
from fusedrec_torchrec.training.observed_step import TIMES, ObservedStep, of_all_ranks
from fusedrec_torchrec.training.source import open_source
from tests.cluster import Cluster
from tests.training.runs import CPU, small, train


def train_records(folder: Path) -> list[dict[str, Any]]:
    return [record for record in read_log(folder) if record["kind"] == "train"]


def test_records_have_stages_and_the_load_of_every_rank(cluster_2: Cluster, tmp_path: Path) -> None:
    cluster_2.run(train, small(tmp_path, eval_every=0))
    for record in train_records(tmp_path):
        assert len(record["rows_looked_up_by_rank"]) == len(record["bytes_sent_by_rank"]) == 2
        assert min(record["rows_looked_up_by_rank"]) > 0
        assert record["bytes_sent_by_rank"][0] == record["bytes_sent_per_step"]  # of the first rank
        stages = record["stage_ms"]
        assert {"dedup", "ids", "lookup", "rows", "pooling", "gradients", "other"} <= set(stages)
        assert set(stages) <= set(TIMES) and min(stages.values()) >= 0
        assert list(stages) == [name for name in TIMES if name in stages]  # in the order of a step


@pytest.mark.parametrize("sharding", ["fused_table_wise", "table_wise", "row_wise"])
def test_the_load_of_other_shardings_is_known_too(
    cluster_2: Cluster, tmp_path: Path, sharding: str
) -> None:
    data = small(tmp_path, sharding={"type": sharding}, steps=6, eval_every=0)
    cluster_2.run(train, data)
    (record, *_) = train_records(tmp_path)
    loads = record["rows_looked_up_by_rank"]
    if not sharding.startswith("fused"):  # every id of the batch is looked up somewhere
        assert sum(loads) >= 128 * 3
        assert "stage_ms" not in record  # they have no stages of ours
    assert sum(loads) > 0


def test_an_observed_step_leaves_nothing_behind(cluster_2: Cluster, tmp_path: Path) -> None:
    """All other steps have no hooks and no timer."""
    for hooks, timer in cluster_2.run(after_training, small(tmp_path, steps=6, eval_every=0)):
        assert hooks == 0 and timer is None


def after_training(data: dict[str, Any]) -> tuple[int, object]:
    config = from_mapping(TrainConfig, data)
    training = Training(config, open_source(config), CPU, None)
    training.run()
    return hooks_of(lookups_of(training.model)), StageTimer._active


def hooks_of(lookups: list[nn.Module]) -> int:
    return sum(len(lookup._forward_pre_hooks) for lookup in lookups)


def numbers_beside() -> tuple[int, dict[str, Any]]:
    rank = dist.get_rank()
    observed = ObservedStep(rows=10 * (rank + 1), seconds={"lookup": 0.001 * (rank + 1)})
    with CollectiveCounter() as counter:
        _, record = of_all_ranks(ClickSums(CPU), observed, {"bytes_sent_per_step": 5.0 + rank})
    return len(counter.collectives), record


def test_numbers_of_all_ranks_come_with_the_collective_of_the_metrics(cluster_2: Cluster) -> None:
    for collectives, record in cluster_2.run(numbers_beside):
        assert collectives == 1
        assert record == {
            "rows_looked_up_by_rank": [10, 20],
            "bytes_sent_by_rank": [5, 6],
            "stage_ms": {"lookup": pytest.approx(1.5), "data": 0.0},
        }


def test_tensorboard_gets_the_most_and_the_mean_of_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written: dict[str, float] = {}
    log = RunLog(tmp_path, 0, tensorboard=True)
    monkeypatch.setattr(
        log._writer, "add_scalar", lambda name, value, step: written.update({name: value})
    )
    log.write(5, "train", {"log_loss": 0.5, "by_rank": [1.0, 3.0], "stage_ms": {"rows": 2.0}})
    log.close()
    assert written == {
        "train/log_loss": 0.5,
        "train/by_rank/most": 3.0,
        "train/by_rank/mean": 2.0,
        "train/stage_ms/rows": 2.0,
    }
    assert read_log(tmp_path)[0]["by_rank"] == [1.0, 3.0]
