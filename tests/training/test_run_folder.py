"""Where a run goes on, what it refuses, and that one training has a folder at a time."""

import json
import os
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import yaml

from fusedrec_torchrec.core.config import from_mapping, to_yaml, with_overrides
from fusedrec_torchrec.training.config import TrainConfig
from fusedrec_torchrec.training.data.prepare import prepare
from fusedrec_torchrec.training.main import _job
from fusedrec_torchrec.training.run_folder import check_run, claim, locked
from fusedrec_torchrec.training.run_state import RunState, find_checkpoints, read_run_state
from fusedrec_torchrec.training.source import open_source
from tests.training.data.criteo_text import lines, write
from tests.training.runs import small


def config_of(folder: Path, *overrides: str) -> TrainConfig:
    return from_mapping(TrainConfig, with_overrides(small(folder), overrides))


def save(folder: Path, step: int, *overrides: str, **changes: Any) -> Path:
    """A checkpoint as far as the folder is concerned."""
    config = config_of(folder, *overrides)
    path = folder / "checkpoints" / f"step_{step:08d}"
    path.mkdir(parents=True)
    state = RunState(step, [], yaml.safe_load(to_yaml(config)), {}, 2, **changes)
    (path / "run.json").write_text(json.dumps(asdict(state)))
    (folder / "metrics.jsonl").touch()
    return path


def check(
    folder: Path, resume: str | None, *overrides: str, overwrite: bool = False
) -> Path | None:
    config = config_of(folder, *overrides)
    return check_run(config, open_source(config), resume, overwrite)


def test_latest_is_the_highest_complete_step(tmp_path: Path) -> None:
    for step in (9, 10, 100):
        save(tmp_path, step)
    (tmp_path / "checkpoints" / "step_00000200").mkdir()  # nothing in it
    (tmp_path / "checkpoints" / ".step_00000300.partial").mkdir()
    assert [p.name for p in find_checkpoints(tmp_path / "checkpoints")] == [
        *("step_00000009", "step_00000010", "step_00000100"),
    ]
    assert check(tmp_path, "latest") == tmp_path / "checkpoints" / "step_00000100"
    first = tmp_path / "checkpoints" / "step_00000009"
    assert check(tmp_path, str(first)) == first


def test_a_run_in_the_folder_is_neither_resumed_nor_replaced_by_chance(tmp_path: Path) -> None:
    assert check(tmp_path, None) is None
    save(tmp_path, 5)
    with pytest.raises(ValueError, match="holds a run already: use --resume"):
        check(tmp_path, None)
    assert check(tmp_path, None, overwrite=True) is None
    assert find_checkpoints(tmp_path / "checkpoints")  # checking changes nothing


@pytest.mark.parametrize(
    ("override", "problem"),
    [
        ("model.over_arch=[8, 1]", "model.over_arch is [8, 1], was [16, 1]"),
        ("model.architecture=dlrm_dcn", "model.architecture is dlrm_dcn, was dlrm"),
        ("tables.0.rows=60", "tables is"),
        ("seed=1", "seed is 1, was 0"),
        ("data.seed=1", "data.seed is 1, was 0"),
        ("data.batch_size=256", "data.batch_size is 256, was 128"),
        ("data.lanes=2", "data.lanes is 2, was 4"),
        ("data.held_out=0.2", "data.held_out is 0.2, was 0.1"),
        ("data.shuffle=false", "data.shuffle is False, was True"),
        ("data.chunk_batches=3", "data.chunk_batches is 3, was 16"),
        ("data.synthetic.signal=1.0", "data.synthetic.signal is 1.0, was 2.0"),
        ("optimizer.dense.type=sgd", "optimizer.dense.type is sgd, was adam"),
        ("optimizer.embedding.type=sgd", "optimizer.embedding.type is sgd"),
        ("sharding.exchange.hash_ids=true", "sharding.exchange.hash_ids is True, was False"),
    ],
)
def test_another_run_is_not_resumed(tmp_path: Path, override: str, problem: str) -> None:
    save(tmp_path, 5)
    with pytest.raises(ValueError, match="is of a different run") as caught:
        check(tmp_path, "latest", override)
    assert problem in str(caught.value)


@pytest.mark.parametrize(
    "override",
    [
        *("steps=50", "eval_every=5", "data.workers=2", "logging.log_every=1", "launch.ranks=4"),
        *("sharding.type=table_wise", "sharding.tables.a=row_wise", "checkpoint.keep=9"),
        *("optimizer.dense.learning_rate=0.5", "optimizer.schedule.warmup_steps=2"),
        *("sharding.exchange.input_dist=exact_counts", "sharding.hot.rule.top_k=5"),
        *("sharding.grid.sharding_group_size=2", "plan=plan.yaml"),
    ],
)
def test_what_may_change_may_change(tmp_path: Path, override: str) -> None:
    path = save(tmp_path, 5)
    assert check(tmp_path, "latest", override) == path


def test_a_run_of_groups_may_go_on_without_them(tmp_path: Path) -> None:
    path = save(tmp_path, 5, "sharding.grid.sharding_group_size=2")
    assert check(tmp_path, "latest", "sharding.grid=null") == path


def test_another_hot_set_is_refused_where_it_decides_on_the_order_of_samples(
    tmp_path: Path,
) -> None:
    given = [
        "sharding.hot.hot_set=a.npz",
        "sharding.hot.hot_batches=true",
        "data.hot_batches.order=stream",
    ]
    path = save(tmp_path, 5, *given)
    assert check(tmp_path, "latest", *given) == path
    with pytest.raises(ValueError, match=r"sharding.hot.hot_set is b.npz, was a.npz"):
        check(tmp_path, "latest", *given, "sharding.hot.hot_set=b.npz")


def test_other_data_is_not_resumed(tmp_path: Path) -> None:
    """Also when it has the same number of samples and lies in the same place."""
    content = lines(400)
    text = write(tmp_path / "a.tsv", content)
    data = small(tmp_path / "run")
    data["tables"] = []
    data["data"] = {
        "source": "criteo",
        "criteo": {"prepared": str(tmp_path / "one")},
        "batch_size": 64,
        "lanes": 4,
    }
    one = prepare([text], tmp_path / "one", progress=False)
    other = prepare([write(text, content[::-1])], tmp_path / "two", progress=False)
    config = from_mapping(TrainConfig, data)
    path = tmp_path / "run" / "checkpoints" / "step_00000005"
    path.mkdir(parents=True)
    state = RunState(5, [], yaml.safe_load(to_yaml(config)), one.identity, 2)
    (path / "run.json").write_text(json.dumps(asdict(state)))
    assert check_run(config, one, "latest", False) == path
    with pytest.raises(ValueError, match="the data is not that of the checkpoint"):
        check_run(config, other, "latest", False)


def test_damaged_and_foreign_checkpoints_are_named(tmp_path: Path) -> None:
    path = save(tmp_path, 5, version=7)
    with pytest.raises(ValueError, match="has version 7, this release reads version 1"):
        read_run_state(path)
    (path / "run.json").write_text("{")
    with pytest.raises(ValueError, match=r"run\.json is damaged"):
        read_run_state(path)
    with pytest.raises(ValueError, match="is no checkpoint of a run"):
        check(tmp_path, str(tmp_path))
    with pytest.raises(ValueError, match="is no checkpoint of a run"):
        check(tmp_path, str(path / "run.json"))


def take(folder: Path, resume: str | None, job: str | None, overwrite: bool = False) -> Path | None:
    config = config_of(folder)
    return claim(config, open_source(config), resume, overwrite, job)[0]


def test_going_back_leaves_the_later_branch(tmp_path: Path) -> None:
    early, late = save(tmp_path, 5), save(tmp_path, 9)
    assert take(tmp_path, str(early), "job") == early
    assert find_checkpoints(tmp_path / "checkpoints") == [early]
    assert late.with_name("abandoned_step_00000009").is_dir()  # set aside, not lost


def test_a_job_that_is_started_again_goes_on(tmp_path: Path) -> None:
    """Whatever the count of restarts, with the command line of its first start."""
    save(tmp_path, 3)
    assert take(tmp_path, None, "job", overwrite=True) is None
    assert not find_checkpoints(tmp_path / "checkpoints")  # of the run that was there
    assert take(tmp_path, None, "job", overwrite=True) is None  # nothing saved yet
    path = save(tmp_path, 4)
    assert take(tmp_path, None, "job", overwrite=True) == path
    assert take(tmp_path, None, "job") == path
    with pytest.raises(ValueError, match="holds a run already"):
        take(tmp_path, None, "another job")
    with pytest.raises(ValueError, match="holds a run already"):
        take(tmp_path, None, None)


def test_a_restart_goes_back_to_the_checkpoint_it_was_given(tmp_path: Path) -> None:
    """Of another folder, as long as nothing was saved in this one."""
    given = save(tmp_path / "other", 40)
    (tmp_path / "new").mkdir()
    assert take(tmp_path / "new", str(given), "job") == given
    assert take(tmp_path / "new", str(given), "job") == given
    own = save(tmp_path / "new", 50)
    assert take(tmp_path / "new", str(given), "job") == own


def test_a_launcher_without_a_name_is_told_from_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")  # torchrun's static rendezvous
    assert _job() == _job() != "none" and str(os.getppid()) in str(_job())
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "named")
    assert _job() == "named"
    monkeypatch.delenv("TORCHELASTIC_RUN_ID")
    assert _job() is None


def test_the_one_before_a_damaged_checkpoint_is_offered(tmp_path: Path) -> None:
    first, last = save(tmp_path, 5), save(tmp_path, 9)
    (last / "run.json").write_text("{")
    with pytest.raises(ValueError, match=rf"run.json is damaged.*--resume {first}"):
        check(tmp_path, "latest")


def test_one_training_at_a_time(tmp_path: Path) -> None:
    with (
        locked(tmp_path / "run"),
        pytest.raises(ValueError, match="in use by another training"),
        locked(tmp_path / "run"),
    ):
        pass
    with locked(tmp_path / "run"):
        pass
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match="cannot be written"), locked(tmp_path / "file" / "run"):
        pass
