"""Training runs with rows that arrive early: the same weights and losses, also after a stop."""

import json
from pathlib import Path
from typing import Any

import pytest

from fusedrec_torchrec.core.config import from_mapping
from fusedrec_torchrec.training.checks import check_settings
from fusedrec_torchrec.training.config import TrainConfig
from tests.cluster import Cluster
from tests.faults.faulty import train_faulty
from tests.faults.test_bad_batches import STEP, sample_of
from tests.faults.test_bad_batches import config as bad_data
from tests.training.runs import small, train
from tests.training.test_hot_training import same, with_hot_rows


def with_early_rows(data: dict[str, Any], folder: Path) -> dict[str, Any]:
    """The same run with early rows, in another folder."""
    sharding = {**data.get("sharding", {}), "early_rows": True}
    logging = {**data["logging"], "directory": str(folder)}
    return data | {"sharding": sharding, "logging": logging}


@pytest.mark.parametrize("kind", ["plain", "hot", "compressed"])
def test_early_rows_do_not_change_what_is_learned(
    cluster_2: Cluster, tmp_path: Path, kind: str
) -> None:
    folder = tmp_path / "late"
    data = with_hot_rows(folder, adapt={"every": 4}) if kind == "hot" else small(folder)
    if kind == "compressed":
        data["sharding"] = {
            "exchange": {"codecs": {"forward": {"type": "bf16"}, "backward": {"type": "int8"}}},
            "dense_gradients": {"density": 0.1, "min_elements": 30},
        }
    late = cluster_2.run(train, data)
    early = cluster_2.run(train, with_early_rows(data, tmp_path / "early"))
    for one, other in zip(late, early, strict=True):
        same(one, other)
        assert one["result"]["auc"] == other["result"]["auc"]
    records = [
        json.loads(line) for line in (tmp_path / "early" / "metrics.jsonl").read_text().splitlines()
    ]
    shares = [r["early_share_of_rows"] for r in records if "early_share_of_rows" in r]
    assert len(shares) == sum(record["kind"] == "train" for record in records) > 2
    assert all(0 < share < 1 for share in shares)


def test_a_resumed_run_equals_an_uninterrupted_one(cluster_2: Cluster, tmp_path: Path) -> None:
    """Checkpoints are taken between two evaluations, while early rows are on their way."""
    data = small(tmp_path / "late")
    late = cluster_2.run(train, data)
    data = with_early_rows(data, tmp_path / "run") | {"checkpoint": {"every": 7, "keep": 9}}
    whole = cluster_2.run(train, data)
    resumed = cluster_2.run(train, data, str(tmp_path / "run" / "checkpoints" / "step_00000014"))
    for one, *others in zip(late, whole, resumed, strict=True):
        for other in others:
            same(one, other)


@pytest.fixture(scope="module")
def sample(tmp_path_factory: pytest.TempPathFactory) -> int:
    return sample_of(tmp_path_factory.mktemp("data"), STEP)


@pytest.mark.parametrize("kind", ["id", "gradient"])
def test_a_skipped_step_is_skipped(
    cluster_2: Cluster, tmp_path: Path, sample: int, kind: str
) -> None:
    data = bad_data(tmp_path / "late") | {"bad_batches": {"policy": "skip"}}
    late = cluster_2.run(train_faulty, data, {sample: kind})
    early = cluster_2.run(train_faulty, with_early_rows(data, tmp_path / "early"), {sample: kind})
    for one, other in zip(late, early, strict=True):
        assert one["skipped"] == other["skipped"] == 1
        same(one, other)


def test_settings_that_early_rows_contradict(tmp_path: Path) -> None:
    data = small(tmp_path)
    with pytest.raises(ValueError, match=r"sharding\.early_rows is true, but no table is fused"):
        from_mapping(TrainConfig, data | {"sharding": {"early_rows": True, "type": "row_wise"}})
    grid = {"sharding_group_size": 1}
    config = from_mapping(TrainConfig, data | {"sharding": {"early_rows": True, "grid": grid}})
    with pytest.raises(ValueError, match=r"sharding\.early_rows and sharding\.grid are both set"):
        check_settings(config, 2)
    config = from_mapping(
        TrainConfig, data | {"sharding": {"early_rows": True}, "launch": {"device": "cuda"}}
    )
    with pytest.raises(ValueError, match=r"launch\.device is cuda, must be false there"):
        check_settings(config, 2)
