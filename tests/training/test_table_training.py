"""Training on files with columns of one's own: all that works on Criteo's works on them."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch

from fusedrec_torchrec.access.hot_set import HotSet
from fusedrec_torchrec.access.profile import sample_profile
from fusedrec_torchrec.cli.main import main
from fusedrec_torchrec.core.config import from_mapping
from fusedrec_torchrec.training.config import TrainConfig
from fusedrec_torchrec.training.data.prepared import PreparedData
from fusedrec_torchrec.training.data.separate import separate
from fusedrec_torchrec.training.loaders import eval_loader, train_loader
from fusedrec_torchrec.training.run_state import find_checkpoints
from fusedrec_torchrec.training.source import open_source
from tests.cluster import Cluster
from tests.training.data.table_text import write_table
from tests.training.runs import small, train

SAMPLES = 3000
WHEN = {"timestamp": {"column": "when"}}


@pytest.fixture(scope="module")
def clicks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Clicks that follow from item and user, with a history that shares the table of items."""
    random = np.random.default_rng(0)
    item = (60 * random.random(SAMPLES) ** 2).astype(int)
    user = random.integers(0, 200, SAMPLES)
    lengths = random.integers(0, 5, SAMPLES)
    history = [(60 * random.random(n) ** 2).astype(int).tolist() for n in lengths]
    table = {
        "clicked": pa.array((item % 2 == 0) ^ (random.random(SAMPLES) < 0.1)),
        "price": pa.array(random.random(SAMPLES) * 100),
        "item": pa.array([f"i{i}" for i in item]),
        "user": pa.array(user),
        "history": pa.array([[f"i{i}" for i in bag] for bag in history]),
        "minutes": pa.array([random.random(len(bag)).tolist() for bag in history]),
        "when": pa.array(1_511_540_000 + np.arange(SAMPLES), pa.timestamp("s")),
    }
    return write_table(tmp_path_factory.mktemp("clicks") / "clicks.parquet", table, rows=500)


def settings_of(clicks: Path, folder: Path, **changes: Any) -> dict[str, Any]:
    table: dict[str, Any] = {
        "files": [str(clicks)],
        "label": "clicked",
        "dense": ["price"],
        "sparse": {
            "item": {},
            "user": {},
            "history": {"table": "item", "bag": True, "weights": "minutes"},
        },
        "prepared": str(folder.parent / f"{folder.name}_data"),
        "group_rows": 128,
        **changes.pop("table", {}),
    }
    reading = {"batch_size": 128, "lanes": 4, "workers": 0, "chunk_batches": 4}
    data = {"table": table, **reading, **changes.pop("data", {})}
    return small(folder, tables=[], data=data, **changes)


def same(one: dict[str, Any], other: dict[str, Any]) -> None:
    assert one["state"].keys() == other["state"].keys()
    for name, value in one["state"].items():
        assert torch.equal(value, other["state"][name]), name


def test_a_model_learns_and_goes_on_bit_for_bit(
    cluster_2: Cluster, clicks: Path, tmp_path: Path
) -> None:
    """With bags, weights and a table of two features, on two ranks."""
    more = {"checkpoint": {"every": 10}, "optimizer": {"embedding": {"learning_rate": 0.1}}}
    settings = settings_of(clicks, tmp_path / "whole", steps=60, eval_every=30, **more)
    straight = cluster_2.run(train, settings)
    assert straight[0]["result"]["auc"] > 0.7
    stopped = {**settings, "steps": 30, "logging": {**settings["logging"]}}
    stopped["logging"]["directory"] = str(tmp_path / "stopped")
    cluster_2.run(train, stopped)
    path = find_checkpoints(tmp_path / "stopped" / "checkpoints")[-1]
    resumed = cluster_2.run(train, {**stopped, "steps": 60}, str(path))
    for one, other in zip(straight, resumed, strict=True):
        same(one, other)
        assert one["result"]["auc"] == other["result"]["auc"]


def test_shardings_learn_the_same(cluster_2: Cluster, clicks: Path, tmp_path: Path) -> None:
    fused = cluster_2.run(train, settings_of(clicks, tmp_path / "fused"))
    stock = settings_of(clicks, tmp_path / "stock", sharding={"type": "table_wise"})
    other = cluster_2.run(train, stock)
    one, two = fused[0]["result"], other[0]["result"]
    assert one["log_loss"] == pytest.approx(two["log_loss"], abs=1e-4)


def test_no_dense_column_and_hashed_tables_train(
    cluster_1: Cluster, clicks: Path, tmp_path: Path
) -> None:
    table = {"dense": [], "tables": {"user": {"hash_rows": 50}}}
    settings = settings_of(clicks, tmp_path / "run", table=table, checkpoint={"every": 12})
    (done,) = cluster_1.run(train, settings)
    assert 0 < done["result"]["log_loss"] < 1
    (again,) = cluster_1.run(train, settings, str(tmp_path / "run/checkpoints/step_00000012"))
    same(done, again)


def hot_set(settings: dict[str, Any], path: Path) -> HotSet:
    source = open_source(from_mapping(TrainConfig, settings))
    chosen = HotSet.most_used(sample_profile(source, 1.0, 10_000, progress=False), 120)
    chosen.save(path)
    return chosen


@pytest.mark.parametrize("order", ["stream", "separated"])
def test_hot_batches_of_shared_tables_are_hot(clicks: Path, tmp_path: Path, order: str) -> None:
    settings = settings_of(clicks, tmp_path / "run")
    chosen = hot_set(settings, tmp_path / "hot.npz")
    settings["sharding"] = {"hot": {"hot_set": str(tmp_path / "hot.npz"), "hot_batches": True}}
    settings["data"]["hot_batches"] = {"order": order}
    source = open_source(from_mapping(TrainConfig, {**settings, "sharding": {}, "data": {
        **settings["data"], "hot_batches": {}}}))  # fmt: skip
    assert isinstance(source, PreparedData)
    if order == "separated":
        separate(source, chosen, tmp_path / "separated", 0.1, progress=False)
        settings["data"]["table"]["prepared"] = str(tmp_path / "separated")
    config = from_mapping(TrainConfig, settings)
    source = open_source(config)
    loader = train_loader(config, source, 0, 1)
    hot = {name: set(ids.tolist()) for name, ids in chosen.ids.items()}

    def is_hot(batch: Any) -> bool:
        features = batch.sparse_features
        return all(
            set(features[name].values().tolist()) <= hot[table]
            for name, table in source.features.items()
        )

    kinds = [is_hot(batch) for batch in loader.read(0, loader.batches)]
    assert 0 < sum(kinds) < len(kinds)
    before = sum(hot_samples_of(source, hot))
    assert sum(kinds) >= before // 128 - 6


def hot_samples_of(source: Any, hot: dict[str, set[int]]) -> list[bool]:
    """One by one."""
    result = []
    for number in range(source.samples * 9 // 10):
        sample = source.read(number, number + 1)
        ends = np.cumsum(sample.lengths[:, 0])
        bags = np.split(sample.ids, ends[:-1])
        tables = source.features.values()
        result.append(all(set(b.tolist()) <= hot[t] for b, t in zip(bags, tables, strict=True)))
    return result


def test_separated_data_has_the_same_samples(clicks: Path, tmp_path: Path) -> None:
    table = {"split": {"by": "time", "start": "2017-11-24 16:50:00"}, **WHEN}
    settings = settings_of(clicks, tmp_path / "run", table=table)
    source = open_source(from_mapping(TrainConfig, settings))
    assert isinstance(source, PreparedData) and source.held_out
    chosen = hot_set(settings, tmp_path / "hot.npz")
    done = separate(source, chosen, tmp_path / "separated", 0.5, progress=False)
    assert done.held_out == source.held_out and done.features == source.features

    def sample(data: PreparedData, number: int) -> tuple[Any, ...]:
        one = data.read(number, number + 1)
        assert one.lengths is not None and one.weights is not None
        parts = (one.dense, one.labels, one.ids, one.lengths, one.weights)
        return tuple(tuple(part.ravel().tolist()) for part in parts)

    train = source.samples - source.held_out
    numbers = range(source.samples)
    before, after = ([sample(data, n) for n in numbers] for data in (source, done))
    assert sorted(before[:train]) == sorted(after[:train]) and before[train:] == after[train:]


def test_held_out_samples_are_those_of_the_split(clicks: Path, tmp_path: Path) -> None:
    table = {"split": {"by": "time", "start": "2017-11-24 17:00:00"}, **WHEN}
    config = from_mapping(TrainConfig, settings_of(clicks, tmp_path / "run", table=table))
    source = open_source(config)
    late = 1_511_540_000 + SAMPLES - 1_511_542_800
    assert source.held_out == late
    train, held_out = train_loader(config, source, 0, 1), eval_loader(config, source, 0, 1)
    assert train.batches == (SAMPLES - late) // 128 and held_out.batches == late // 128
    whole = source.read(0, SAMPLES).dense[:, 0]
    prices = torch.cat([b.dense_features[:, 0] for b in train.read(0, train.batches)])
    assert set(prices.tolist()) <= set(whole[: SAMPLES - late].tolist())


def test_commands_work_with_a_table(
    clicks: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: Any
) -> None:
    """prepare, profile, plan and inspect, of a configuration."""
    settings = settings_of(clicks, tmp_path / "run")
    path = tmp_path / "clicks.yaml"
    path.write_text(json.dumps(settings))  # which is YAML, too
    assert main(["prepare", "--config", str(path), "--quiet"]) == 0
    shown = capsys.readouterr().out
    assert "bags with weights" in shown and "history" in shown
    prepared = settings["data"]["table"]["prepared"]
    assert main(["inspect", prepared]) == 0
    assert capsys.readouterr().out == shown
    profile = [str(path), "--json", "--batch-size", "500", "--quiet"]
    saved = [
        "--save",
        str(tmp_path / "p.npz"),
        "--share",
        "1",
        "--hot-set",
        str(tmp_path / "h.npz"),
    ]
    assert main(["profile", *profile, *saved, "--hot-rows", "200"]) == 0
    figures = json.loads(capsys.readouterr().out)
    tables = {table["name"]: table for table in figures["tables"]}
    source = open_source(from_mapping(TrainConfig, settings))
    samples = source.read(0, SAMPLES)
    assert samples.lengths is not None
    items = SAMPLES + int(samples.lengths[2].sum())
    assert (tables["item"]["accesses"], tables["user"]["accesses"]) == (items, SAMPLES)
    assert figures["hot_set"]["hot_samples"] > 0
    planner = {"cluster": "one.yaml", "train": "clicks.yaml", "profile": "p.npz"}
    cluster = Path(__file__).parents[2] / "configs" / "clusters" / "one_machine.yaml"
    (tmp_path / "one.yaml").write_text(cluster.read_text())
    (tmp_path / "plan_task.yaml").write_text(json.dumps(planner))
    capsys.readouterr()
    out = ["--out", str(tmp_path / "plan.yaml")]
    assert main(["plan", "--config", str(tmp_path / "plan_task.yaml"), *out]) == 0
    assert "item" in capsys.readouterr().out


def test_mistakes_are_found_before_any_rank_starts(
    clicks: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: Any
) -> None:
    launch = "fusedrec_torchrec.training.launch.launch"
    monkeypatch.setattr(launch, lambda *_: pytest.fail("launched"))
    settings = settings_of(clicks, tmp_path / "run")
    path = tmp_path / "clicks.yaml"
    path.write_text(json.dumps(settings))
    late = "data.table.split={by: time, start: 2030-01-01}"
    for overrides, problem in (
        (["data.table.label=x"], "data.table.label names column 'x', which"),
        (["data.table.files=[]", "data.table.prepared=null"], "data.table.files is empty"),
        (["data.table.files=[no*.csv]"], "pattern 'no*.csv' matches no file"),
        (
            ["data.source=python", "data.table=null", "tables=[{name: a, rows: 5}]"],
            "training.train",
        ),
        (["data.batch_size=8192"], "3000 training samples do not fill one batch"),
        ([late, "data.table.timestamp={column: when}"], "data.table.split holds out 0 samples"),
        (
            ["sharding.tables.history=row_wise"],
            "names 'history', which is no table; there are item",
        ),
    ):
        prepared = f"data.table.prepared={tmp_path / str(len(problem))}"
        changed = [prepared, *overrides]
        if "held_out" not in problem and "8192" in overrides[0]:
            changed.append("data.held_out=0")
        flags = [flag for setting in changed for flag in ("--set", setting)]
        assert main(["train", "--config", str(path), "--quiet", *flags]) == 2
        assert problem in capsys.readouterr().err
