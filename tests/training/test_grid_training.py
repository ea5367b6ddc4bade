"""Training runs with 2D parallelism: what is learned, and after a stop."""

from pathlib import Path
from typing import Any

import pytest
import torch

from fusedrec_torchrec.core.config import from_mapping
from fusedrec_torchrec.training.config import TrainConfig
from fusedrec_torchrec.training.main import _claimed
from fusedrec_torchrec.training.source import open_source
from tests.cluster import Cluster
from tests.training.runs import small, train


def with_grid(folder: Path, **grid: Any) -> dict[str, Any]:
    data = small(folder)
    data["sharding"] = {"grid": {"sharding_group_size": 2, **grid}}
    return data


def test_shared_gradients_learn_what_one_group_learns(cluster_4: Cluster, tmp_path: Path) -> None:
    plain = cluster_4.run(train, small(tmp_path / "plain"))[0]["result"]
    groups = cluster_4.run(train, with_grid(tmp_path / "grid", sync="gradients"))[0]["result"]
    assert groups["auc"] == pytest.approx(plain["auc"], abs=1e-4)
    assert groups["log_loss"] == pytest.approx(plain["log_loss"], abs=1e-4)


@pytest.mark.parametrize(
    "grid",
    [
        {"sync_every": 3},
        pytest.param({"sync": "gradients"}, marks=pytest.mark.slow),
        pytest.param({"overlap": "one_step"}, marks=pytest.mark.slow),
        pytest.param(
            {"overlap": "until_lookup", "layout": "groups_adjacent"}, marks=pytest.mark.slow
        ),
    ],
    ids=["every 3 steps", "gradients", "one_step", "until_lookup"],
)
def test_a_resumed_run_equals_an_uninterrupted_one(
    cluster_4: Cluster, tmp_path: Path, grid: dict[str, Any]
) -> None:
    data = with_grid(tmp_path / "run", **grid)
    data |= {"eval_every": 4, "checkpoint": {"every": 7, "keep": 9}}
    data["optimizer"]["embedding"] = {"type": "momentum_scaled_rowwise_adagrad"}
    whole = cluster_4.run(train, data)
    checkpoint = str(tmp_path / "run" / "checkpoints" / "step_00000014")
    resumed = cluster_4.run(train, data, checkpoint)
    for one, other in zip(whole, resumed, strict=True):
        assert one["state"].keys() == other["state"].keys() and len(one["state"]) > 8
        for name, value in one["state"].items():
            assert torch.equal(value, other["state"][name]), name


@pytest.mark.parametrize(
    "groups_first",
    [True, pytest.param(False, marks=pytest.mark.slow)],
    ids=["2D to 1D", "1D to 2D"],
)
def test_a_run_goes_on_with_or_without_groups(
    cluster_4: Cluster, tmp_path: Path, groups_first: bool
) -> None:
    """Groups that share gradients train as one: so the result is that of a run without a break."""
    plain = small(tmp_path / "run") | {"checkpoint": {"every": 12}}
    groups = plain | {"sharding": {"grid": {"sharding_group_size": 2, "sync": "gradients"}}}
    first, then = (groups, plain) if groups_first else (plain, groups)
    whole = cluster_4.run(train, first)[0]["result"]
    checkpoint = cluster_4.run(claimed, then, str(tmp_path / "run/checkpoints/step_00000012"))[0]
    resumed = cluster_4.run(train, then, checkpoint)[0]["result"]
    assert resumed["log_loss"] == pytest.approx(whole["log_loss"], abs=1e-4)
    assert resumed["auc"] == pytest.approx(whole["auc"], abs=1e-4)


def claimed(data: dict[str, Any], resume: str) -> str:
    """The checkpoint that ``fusedrec train --resume`` would go on from."""
    config = from_mapping(TrainConfig, data)
    return str(_claimed(config, open_source(config), resume, overwrite=False, job=None))


def test_settings_that_do_not_fit(tmp_path: Path) -> None:
    data = with_grid(tmp_path, sync="gradients", sync_every=2)
    with pytest.raises(ValueError, match="sync_every is 2 with sync 'gradients'"):
        from_mapping(TrainConfig, data)
    data = small(tmp_path)
    data["optimizer"]["embedding"] = {"type": "rowwise_adagrad", "momentum_scale": 2.0}
    with pytest.raises(ValueError, match=r"momentum_scale is 2\.0, must be left out"):
        from_mapping(TrainConfig, data)
