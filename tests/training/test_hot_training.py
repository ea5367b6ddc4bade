"""Training runs with hot rows and hot batches: the same weights, also after a stop."""

from pathlib import Path
from typing import Any

import pytest
import torch

from fusedrec_torchrec.access.hot_set import HotSet
from fusedrec_torchrec.access.profile import sample_profile
from fusedrec_torchrec.core.config import from_mapping
from fusedrec_torchrec.training.config import TrainConfig
from fusedrec_torchrec.training.run_state import find_checkpoints, read_run_state
from fusedrec_torchrec.training.source import open_source
from tests.cluster import Cluster
from tests.training.runs import small, train


def with_hot_rows(folder: Path, rows: int = 400, **hot: Any) -> dict[str, Any]:
    """The small run, with the most used rows of its data hot."""
    data = small(folder)
    source = open_source(from_mapping(TrainConfig, data))
    path = folder.parent / "hot.npz"
    HotSet.most_used(sample_profile(source, 0.2, 10_000, progress=False), rows).save(path)
    data["sharding"] = {"hot": {"hot_set": str(path), **hot}}
    return data


def hot_batches(folder: Path, rows: int = 400, **settings: Any) -> dict[str, Any]:
    hot = {"sync_every": settings.pop("sync_every", 1)}
    data = with_hot_rows(folder, rows, hot_batches=True, **hot)
    data["data"]["hot_batches"] = {"order": "stream", **settings}
    data["data"]["chunk_batches"] = 8
    return data


def same(one: dict[str, Any], other: dict[str, Any]) -> None:
    assert one["state"].keys() == other["state"].keys()
    for name, value in one["state"].items():
        assert torch.equal(value, other["state"][name]), name


@pytest.mark.parametrize(
    "hot",
    [
        pytest.param({}, marks=pytest.mark.slow),  # the others are a case of it
        {"hot_batches": True},
        {"adapt": {"every": 4}},
    ],
)
def test_hot_rows_do_not_change_what_is_learned(
    cluster_2: Cluster, tmp_path: Path, hot: dict[str, Any]
) -> None:
    plain = cluster_2.run(train, small(tmp_path / "plain"))
    with_hot = cluster_2.run(train, with_hot_rows(tmp_path / "hot", **hot))
    for one, other in zip(plain, with_hot, strict=True):
        same(one, other)
        assert one["result"]["auc"] == other["result"]["auc"]


@pytest.mark.parametrize(
    "settings",
    [
        pytest.param({}, marks=pytest.mark.slow),  # the others are a case of it
        {"adaptive": True, "rate": 0.5},
        {"sync_every": 3},
    ],
    ids=["fixed", "adaptive", "synced every 3 steps"],
)
def test_a_resumed_run_with_hot_batches_equals_an_uninterrupted_one(
    cluster_2: Cluster, tmp_path: Path, settings: dict[str, Any]
) -> None:
    data = hot_batches(tmp_path / "run", rows=1500, **settings)
    data |= {"eval_every": 4, "checkpoint": {"every": 7, "keep": 9}}
    whole = cluster_2.run(train, data)
    folder = tmp_path / "run" / "checkpoints"
    last = read_run_state(find_checkpoints(folder)[-1])
    # Step 14 is between two evaluations.
    resumed = cluster_2.run(train, data, str(folder / "step_00000014"))
    for one, other in zip(whole, resumed, strict=True):
        same(one, other)
    assert last.step > 14 and last.rates is not None
    assert bool(last.rates["losses"]) == settings.get("adaptive", False)
    assert read_run_state(find_checkpoints(folder)[-1]) == last


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"data.hot_batches.order": "stream"}, "needs sharding.hot.hot_set"),
        ({"data.hot_batches.adaptive": True, "eval_every": 0}, "adaptive needs eval_every"),
        ({"data.hot_batches.rate": 0}, "rate"),
    ],
)
def test_settings_that_do_not_fit(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    data = small(tmp_path)
    for key, value in changes.items():
        *sections, last = key.split(".")
        place = data
        for section in sections:
            place = place.setdefault(section, {})
        place[last] = value
    with pytest.raises(ValueError, match=message):
        from_mapping(TrainConfig, data)
