"""Training from Python: own batches, and tables of whatever library."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
import torch.distributed as dist
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

import fusedrec_torchrec.training
from fusedrec_torchrec.checkpoint.reader import CheckpointReader
from fusedrec_torchrec.core.config import to_mapping
from fusedrec_torchrec.training.config import TrainConfig
from fusedrec_torchrec.training.run_state import find_checkpoints, read_run_state
from tests.cluster import Cluster
from tests.training.runs import small

BATCH = 64


class Clicks:
    """Batches whose clicks follow from the item; the same in every epoch.

    Args:
        share: 0 for even ids only, 1 for odd ones, or else all of them.
    """

    def __init__(
        self, batches: int, seed: int = 0, weighted: bool = False, share: int | None = None
    ) -> None:
        self._batches, self._seed, self._weighted = batches, seed, weighted
        self._share = share

    def __len__(self) -> int:
        return self._batches

    def __iter__(self) -> Iterator[tuple[torch.Tensor, KeyedJaggedTensor, torch.Tensor]]:
        generator = torch.Generator().manual_seed(self._seed)
        for _ in range(self._batches):
            item = torch.randint(0, 40, (BATCH,), generator=generator)
            lengths = torch.randint(0, 4, (BATCH,), generator=generator)
            recent = torch.randint(0, 40, (int(lengths.sum()),), generator=generator)
            if self._share is not None:
                item, recent = (ids // 2 * 2 + self._share for ids in (item, recent))
            values = torch.cat([item, recent])
            features = KeyedJaggedTensor(
                keys=["item", "recent"],
                values=values,
                lengths=torch.cat([torch.ones_like(lengths), lengths]),
                weights=torch.ones(len(values)) if self._weighted else None,
            )
            yield torch.rand(BATCH, 3, generator=generator), features, (item % 2 == 0).float()


FEATURES = {"item": "item", "recent": "item"}


def settings(folder: Path, **changes: Any) -> dict[str, Any]:
    run = small(folder, tables=[{"name": "item", "rows": 40}], data={"source": "python"})
    optimizer = {"embedding": {"learning_rate": 0.1}, "dense": {"learning_rate": 0.01}}
    return {**run, "steps": 40, "eval_every": 20, "optimizer": optimizer, **changes}


def result_of(arguments: tuple[Any, ...], options: dict[str, Any]) -> dict[str, float] | str:
    """Trains on this rank; an error becomes its text."""
    try:
        return fusedrec_torchrec.training.train(*arguments, quiet=True, **options)
    except ValueError as error:
        return str(error)


def run(cluster: Cluster, *arguments: Any, **options: Any) -> Any:
    return cluster.run(result_of, arguments, options)[0]


@pytest.mark.parametrize("weighted", [False, True])
def test_own_batches_are_learned_and_go_on(
    cluster_1: Cluster, tmp_path: Path, weighted: bool
) -> None:
    data, held_out = Clicks(30, weighted=weighted), Clicks(4, seed=1, weighted=weighted)
    options: dict[str, Any] = {"features": FEATURES, "eval_data": held_out}
    every = {"checkpoint": {"every": 20}}
    done = run(cluster_1, data, settings(tmp_path / "a", **every), **options)
    assert done["auc"] > 0.8
    stopped = settings(tmp_path / "b", **every)
    run(cluster_1, data, {**stopped, "steps": 20}, **options)
    resumed = run(cluster_1, data, stopped, resume="latest", **options)
    assert resumed["auc"] == done["auc"] and resumed["log_loss"] == done["log_loss"]
    last = find_checkpoints(tmp_path / "b" / "checkpoints")[-1]
    assert read_run_state(last).config["data"]["batch_size"] == BATCH


def train_share(folder: str) -> dict[str, float] | str:
    """Trains with ids of which ``id % 2`` is this rank."""
    config = settings(Path(folder), steps=20, checkpoint={"every": 20})
    return result_of((Clicks(30, share=dist.get_rank()), config), {"features": FEATURES})


def test_every_rank_brings_its_share(cluster_2: Cluster, tmp_path: Path) -> None:
    done = cluster_2.run(train_share, str(tmp_path / "run"))
    records = [json.loads(x) for x in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert all(isinstance(result, dict) for result in done) and records[-1]["step"] == 20
    (last,) = find_checkpoints(tmp_path / "run" / "checkpoints")
    reader = CheckpointReader(last)
    (state,) = (name for name in reader.tensors if name.endswith("item.momentum1"))
    squares = reader.whole(state).flatten()  # of gradients, summed up: 0 in rows that nobody used
    assert len(squares) == 40
    assert (squares[::2] > 0).all() and (squares[1::2] > 0).all()


def one_time(count: int) -> Iterator[Any]:
    yield from Clicks(count)


def train_once(folder: str) -> tuple[Any, Any]:
    """An iterator cannot be sent to another process."""
    options = {"features": FEATURES}
    once = result_of((one_time(30), settings(Path(folder) / "a", steps=20)), options)
    twice = result_of((one_time(10), settings(Path(folder) / "b", steps=20)), options)
    return once, twice


def test_an_iterator_can_be_trained_on_once(cluster_1: Cluster, tmp_path: Path) -> None:
    ((once, twice),) = cluster_1.run(train_once, str(tmp_path))
    assert isinstance(once, dict)
    assert isinstance(twice, str) and "which gives its batches only once" in twice


def test_mistakes_are_named(cluster_1: Cluster, tmp_path: Path) -> None:
    good = settings(tmp_path / "run")
    one = {"features": FEATURES}
    for data, config, options, problem in (
        (Clicks(5), good, {"features": {"x": "item"}}, "feature 'x' is not in the batches, which"),
        (Clicks(5), good, {"features": {"item": "x"}}, "'item' is of table 'x', which is none of"),
        ([], good, one, "data has no batch"),
        ([3], good, one, "data gives a int, must give (dense [n, d], KeyedJaggedTensor"),
        ([(1, 2, 3)], good, one, "data gives (int, int, int), must be (dense [n, d]"),
        (Clicks(5), small(tmp_path / "x"), one, "but data.source is synthetic, must be python"),
        (pa.table({"y": [1]}), good, one, "data is a Table, but data.table is missing"),
    ):
        assert problem in run(cluster_1, data, config, **options)


def frame(rows: int, seed: int) -> dict[str, Any]:
    random = np.random.default_rng(seed)
    item = random.integers(0, 30, rows)
    return {
        "clicked": (item % 2 == 0).tolist(),
        "price": random.random(rows).tolist(),
        "item": [f"i{i}" for i in item],
        "tags": [[f"t{i % 5}"] * (i % 3) for i in item.tolist()],
    }


def table_settings(folder: Path) -> dict[str, Any]:
    sparse = {"item": {}, "tags": {"bag": True}}
    table = {"label": "clicked", "dense": ["price"], "sparse": sparse}
    data = {"table": table, "batch_size": 64, "lanes": 4, "workers": 0}
    return {**settings(folder), "tables": [], "data": data}


def polars_frame(columns: dict[str, Any]) -> Any:
    return pytest.importorskip("polars").DataFrame(columns)


def lazy_frame(columns: dict[str, Any]) -> Any:
    return pytest.importorskip("polars").LazyFrame(columns)


def hugging_face(columns: dict[str, Any]) -> Any:
    """With its rows in another order, which the table below it does not have."""
    datasets = pytest.importorskip("datasets")
    return datasets.Dataset.from_dict(columns).shuffle(seed=3)


@pytest.mark.parametrize("make", [pa.table, polars_frame, lazy_frame, hugging_face])
def test_a_table_in_memory_is_learned(cluster_1: Cluster, tmp_path: Path, make: Any) -> None:
    data, held_out = make(frame(2000, 0)), make(frame(300, 1))
    done = run(cluster_1, data, table_settings(tmp_path / "run"), eval_data=held_out)
    assert done["auc"] > 0.9
    manifest = json.loads((tmp_path / "run" / "data" / "manifest.json").read_text())
    assert (manifest["samples"], manifest["held_out"]) == (2300, 300)
    assert manifest["tables"] == {"item": 32, "tags": 7}


def test_tables_that_do_not_fit_are_named(cluster_1: Cluster, tmp_path: Path) -> None:
    config = table_settings(tmp_path / "run")
    missing = pa.table({"clicked": [1], "price": [1.0]})
    assert "sparse.item names column 'item'" in run(cluster_1, missing, config)
    assert "has no rows" in run(cluster_1, missing.slice(0, 0), config)
    config["data"]["table"]["files"] = ["x.csv"]
    assert "must be left out where a table is passed" in run(cluster_1, missing, config)


def test_the_data_of_a_configuration_is_trained_on_if_none_is_passed(
    cluster_1: Cluster, tmp_path: Path
) -> None:
    made = run(cluster_1, None, small(tmp_path / "run", steps=4, eval_every=0))
    assert "auc" in made
    config = to_mapping(TrainConfig(tables=[{"name": "a", "rows": 3}]))  # type: ignore[list-item]
    assert config["data"]["source"] == "synthetic"
