"""Training runs with everything compressed: they learn, and go on after a stop to the last bit."""

from pathlib import Path
from typing import Any

import pytest
import torch

from fusedrec_torchrec.training.logs import read_log
from fusedrec_torchrec.training.run_state import find_checkpoints
from tests.cluster import Cluster
from tests.faults.faulty import train_faulty
from tests.faults.test_bad_batches import STEP, sample_of, without_the_step
from tests.faults.test_bad_batches import config as bad_data
from tests.training.runs import train
from tests.training.test_hot_training import with_hot_rows


@pytest.fixture(scope="module")
def sample(tmp_path_factory: pytest.TempPathFactory) -> int:
    return sample_of(tmp_path_factory.mktemp("data"), STEP)


DCT = {"type": "dct", "density": 0.4, "every": 5}


def compressed(folder: Path, **changes: Any) -> dict[str, Any]:
    data = with_hot_rows(folder, codec={**DCT, "density": 0.3})
    data["sharding"]["exchange"] = {
        "codecs": {"forward": DCT, "backward": {"type": "bf16"}},
        "table_codecs": {"c": {"forward": {"type": "int8"}, "backward": {"type": "fp16"}}},
    }
    data["sharding"]["dense_gradients"] = {"density": 0.1, "every": 6, "min_elements": 30}
    data["model"] = {"embedding_dim": 8, "dense_arch": [32, 8], "over_arch": [32, 1]}
    data["checkpoint"] = {"every": 9, "keep": 10}
    return {**data, **changes}


def test_a_run_goes_on_to_the_last_bit(cluster_2: Cluster, tmp_path: Path) -> None:
    whole = cluster_2.run(train, compressed(tmp_path / "whole"))
    folder = tmp_path / "whole" / "checkpoints"
    assert find_checkpoints(folder)[0].name == "step_00000009"
    for at in (9, 18):
        resumed = cluster_2.run(
            train, compressed(tmp_path / str(at)), str(folder / f"step_{at:08d}")
        )
        for one, other in zip(whole, resumed, strict=True):
            assert one["state"].keys() == other["state"].keys()
            for name, value in one["state"].items():
                assert torch.equal(value, other["state"][name]), name


@pytest.mark.parametrize("ranks", [1, pytest.param(4, marks=pytest.mark.slow)])
def test_a_run_goes_on_with_other_ranks(
    clusters: Any, cluster_2: Cluster, tmp_path: Path, ranks: int
) -> None:
    cluster_2.run(train, {**compressed(tmp_path / "two"), "steps": 9})
    (path,) = find_checkpoints(tmp_path / "two" / "checkpoints")
    found = clusters(ranks).run(train, compressed(tmp_path / "other"), str(path))
    assert found[0]["result"]["log_loss"] < 0.7


@pytest.mark.slow
def test_fewer_bytes_and_it_learns(cluster_2: Cluster, tmp_path: Path) -> None:
    plain = with_hot_rows(tmp_path / "plain")
    results = [
        cluster_2.run(train, {**data, "steps": 150, "eval_every": 0})[0]["result"]
        for data in (plain, compressed(tmp_path / "compressed"))
    ]
    assert results[1]["auc"] > results[0]["auc"] - 0.05 > 0.5
    sent = [
        next(r["bytes_sent_per_step"] for r in read_log(tmp_path / name) if r["kind"] == "train")
        for name in ("plain", "compressed")
    ]
    assert sent[1] < sent[0]


def test_a_skipped_step_leaves_nothing_behind(
    cluster_2: Cluster, tmp_path: Path, sample: int
) -> None:
    """Gradients of the dense part that were not used are not added later, either."""
    changes: dict[str, Any] = {
        "sharding": {"dense_gradients": {"density": 0.1, "min_elements": 30}},
    }
    (want, _) = without_the_step(cluster_2, tmp_path / "reference", **changes)
    data = bad_data(tmp_path / "skip", **changes)
    data["bad_batches"] = {"policy": "skip"}
    (got, _) = cluster_2.run(train_faulty, data, {sample: "gradient"})
    assert got["skipped"] == 1
    for name, tensor in want["state"].items():
        assert torch.equal(got["state"][name], tensor), name
