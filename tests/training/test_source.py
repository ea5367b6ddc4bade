"""The data that a configuration names: every setting has its effect, nothing held out leaks."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fusedrec_torchrec.core.config import from_mapping
from fusedrec_torchrec.training.config import TrainConfig
from fusedrec_torchrec.training.data.loader import Loader
from fusedrec_torchrec.training.data.prepared import PreparedData
from fusedrec_torchrec.training.loaders import eval_loader, train_loader
from fusedrec_torchrec.training.source import open_source
from tests.training.data.criteo_text import line, lines, write
from tests.training.runs import small


def criteo(tmp_path: Path, content: list[str], **settings: Any) -> TrainConfig:
    text = write(tmp_path / "train.txt", content)
    data = small(tmp_path / "run")
    data["tables"] = []
    files = {"files": [str(text)], "prepared": str(tmp_path / "prepared")}
    data["data"] = {"source": "criteo", "criteo": files | settings, "batch_size": 32, "lanes": 4}
    return from_mapping(TrainConfig, data)


def changed(config: TrainConfig, **data: Any) -> TrainConfig:
    from dataclasses import replace

    return replace(config, data=replace(config.data, **data))


def dense_rows(batches: Any) -> list[tuple[float, ...]]:
    return [tuple(row) for batch in batches for row in batch.dense_features.tolist()]


def test_training_and_evaluation_share_no_sample(tmp_path: Path) -> None:
    config = criteo(tmp_path, lines(1000))
    source = open_source(config)
    whole = [tuple(row) for row in source.read(0, 1000).dense.tolist()]
    assert len(set(whole)) == 1000
    train = train_loader(config, source, 0, 1)
    seen = dense_rows(train.read(0, train.batches))
    assert set(seen) <= set(whole[:900]) and len(set(seen)) == 900 // 32 * 32
    held_out = eval_loader(config, source, 0, 1)
    assert dense_rows(held_out.read(0, held_out.batches)) == whole[900 : 900 + 100 // 32 * 32]


def test_settings_of_the_loaders_have_their_effect(tmp_path: Path) -> None:
    config = criteo(tmp_path, lines(1000))
    source = open_source(config)
    first = dense_rows(train_loader(config, source, 0, 1).read(0, 1))
    in_order = [tuple(row) for row in source.read(0, 32).dense.tolist()]
    assert first != in_order
    unshuffled = changed(config, shuffle=False)
    assert dense_rows(train_loader(unshuffled, source, 0, 1).read(0, 1)) == in_order
    reseeded = changed(config, seed=5)
    assert dense_rows(train_loader(reseeded, source, 0, 1).read(0, 1)) != first
    wider = changed(config, eval_batch_size=48)
    assert len(dense_rows(eval_loader(wider, source, 0, 1).read(0, 1))) == 48
    loader = train_loader(changed(config, workers=3), source, 0, 1)
    assert isinstance(loader, Loader) and loader._workers == 3


@pytest.mark.parametrize(
    ("where", "value"),
    [
        (("tables", 1, "zipf"), 0.2),
        (("tables", 1, "drift"), 100.0),
        (("tables", 2, "pooling"), 2.0),
        (("data", "synthetic", "click_rate"), 0.5),
        (("data", "synthetic", "signal"), 0.5),
        (("data", "seed"), 3),
    ],
)
def test_settings_of_generated_data_have_their_effect(
    tmp_path: Path, where: tuple[Any, ...], value: float
) -> None:
    data, other = small(tmp_path), small(tmp_path)
    node: Any = other
    for key in where[:-1]:
        node = node[key]
    node[where[-1]] = value
    samples, changes = (
        open_source(from_mapping(TrainConfig, d)).read(5000, 6000) for d in (data, other)
    )
    same = [
        np.array_equal(getattr(samples, name), getattr(changes, name)) for name in ("ids", "labels")
    ]
    assert not all(same)


def test_settings_of_preparation_have_their_effect(tmp_path: Path) -> None:
    content = [*lines(300), "bad"]
    with pytest.raises(ValueError, match=r"train.txt:301: 1 column, must be 40"):
        open_source(criteo(tmp_path, content, min_count=2, max_rows=9))
    source = open_source(criteo(tmp_path, content, min_count=2, max_rows=9, on_bad_line="skip"))
    assert isinstance(source, PreparedData)
    options = source.manifest["identity"]["options"]
    assert (options["min_count"], options["max_rows"]) == (2, 9)
    assert source.left_out[0].endswith("malformed lines were left out: 1 wrong number of columns")
    # Finished data is not taken for flawless either.
    with pytest.raises(ValueError, match=r"txt:301: .*made with data.criteo.on_bad_line: skip"):
        open_source(criteo(tmp_path, content, min_count=2, max_rows=9))


def test_prepared_data_outlives_its_text(tmp_path: Path) -> None:
    config = criteo(tmp_path, [line(1)] * 100)
    open_source(config)
    (tmp_path / "train.txt").unlink()
    assert open_source(config).samples == 100
    (tmp_path / "other.txt").touch()
    elsewhere = changed(
        config,
        criteo=from_mapping(
            type(config.data.criteo),
            {"files": [str(tmp_path / "gone.txt")], "prepared": str(tmp_path / "prepared")},
        ),
    )
    with pytest.raises(ValueError, match=r"gone.txt does not exist, and .* from train.txt"):
        open_source(elsewhere)


def test_labels_reach_the_batches(tmp_path: Path) -> None:
    config = criteo(tmp_path, [line(label=int(i % 3 == 0)) for i in range(400)])
    batch = next(eval_loader(config, open_source(config), 0, 1).read(0, 1))
    assert torch.equal(batch.labels, torch.tensor([float(i % 3 == 0) for i in range(360, 392)]))
