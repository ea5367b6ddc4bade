"""What the folder of a run tells: how far it is, and whether it trains."""

import os
import re
import time
from pathlib import Path

import pytest

from fusedrec_torchrec.training.run_folder import locked
from fusedrec_torchrec.watch.run import WatchedRun, open_runs
from tests.watch.runs import record, whole_run, write_run


def watched(folder: Path) -> WatchedRun:
    (run,) = open_runs([folder])
    run.refresh()
    return run


def make_old(folder: Path) -> None:
    past = time.time() - 3600
    os.utime(folder / "metrics.jsonl", (past, past))


def test_a_run_that_has_ended(tmp_path: Path) -> None:
    run = watched(whole_run(tmp_path))
    assert (run.state, run.step, run.steps) == ("finished", 50, 50)
    assert run.remaining_seconds is None


def test_a_run_that_trains_holds_a_lock_and_knows_how_long_it_takes(tmp_path: Path) -> None:
    write_run(tmp_path, [record(10), record(20)])
    make_old(tmp_path)
    with locked(tmp_path):
        run = watched(tmp_path)
        assert run.state == "running"
        # 30 steps of 100 samples at 1000 samples/s.
        assert run.remaining_seconds == pytest.approx(3.0)
        assert run.about()["ranks"] == 2 and run.about()["sharding"] == "fused_row_wise"
        with pytest.raises(ValueError, match="in use by another training"), locked(tmp_path):
            pass
    assert watched(tmp_path).state == "stopped"


def test_watching_does_not_keep_a_training_out(tmp_path: Path) -> None:
    write_run(tmp_path, [record(10)])
    run = watched(tmp_path)
    with locked(tmp_path):
        run.refresh()
    assert run.state == "running"  # it wrote a moment ago, perhaps on another machine


def test_a_run_without_records_waits(tmp_path: Path) -> None:
    with locked(tmp_path):
        run = watched(tmp_path)
        assert (run.state, run.step, run.steps) == ("waiting", 0, None)
        assert set(run.about().values()) == {None}


def test_a_resumed_run_is_not_finished_by_its_old_summary(tmp_path: Path) -> None:
    whole_run(tmp_path)
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 60, "kind": "train"}\n')
    make_old(tmp_path)
    assert watched(tmp_path).state == "stopped"


def test_a_configuration_is_read_when_it_is_there_and_whole(tmp_path: Path) -> None:
    write_run(tmp_path, [record(10)])
    (tmp_path / "config.yaml").write_text("steps: [half a")
    run = watched(tmp_path)
    assert run.steps is None
    (tmp_path / "config.yaml").write_text("steps: 70")
    run.refresh()
    assert run.steps == 70


def test_folders_that_are_no_runs_are_refused_with_what_to_do(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").touch()
    wanted = r"must be the folder of a run \(logging.directory of a training\), such as runs/tiny"
    for name, problem in (
        ("no", "does not exist"),
        ("file", "is a file"),
        ("empty", "is no run, it has neither metrics.jsonl nor config.yaml"),
    ):
        with pytest.raises(ValueError, match=f"{problem}; it {wanted}"):
            open_runs([tmp_path / name])
    whole_run(tmp_path / "runs" / "a")
    whole_run(tmp_path / "runs" / "b")
    inside = f"{tmp_path / 'runs' / 'a'}, {tmp_path / 'runs' / 'b'}"
    with pytest.raises(ValueError, match=re.escape(f"is no run, but it holds runs: {inside}")):
        open_runs([tmp_path / "runs"])
    one = tmp_path / "runs" / "a"
    with pytest.raises(ValueError, match="is named twice"):
        open_runs([one, one / ".." / "a"])


def test_runs_are_named_as_shortly_as_tells_them_apart(tmp_path: Path) -> None:
    folders = [whole_run(tmp_path / place) for place in ("x/one", "y/one", "y/two")]
    assert [run.name for run in open_runs(folders)] == [str(folders[0]), str(folders[1]), "two"]
