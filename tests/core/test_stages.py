"""Stages: marks for the profiler, sums for the stopwatch."""

import pytest
import torch
from torch.profiler import profile

from fusedrec_torchrec.core.stages import STAGES, StageTimer, stage


def test_the_profiler_sees_stages() -> None:
    with profile() as seen, stage("dedup"):
        torch.ones(3).sum()
    assert "fusedrec::dedup" in {event.key for event in seen.key_averages()}


def test_a_timer_adds_up_what_runs_while_it_is_active(monkeypatch: pytest.MonkeyPatch) -> None:
    with stage("keys"):  # nobody looks
        pass
    clock = iter([10.0, 11.0, 20.0, 22.5, 30.0, 31.0])
    monkeypatch.setattr("fusedrec_torchrec.core.stages.time.perf_counter", lambda: next(clock))
    with StageTimer() as timer:
        with stage("keys"):
            pass
        with stage("keys"):
            pass
        with pytest.raises(RuntimeError), stage("rows"):
            raise RuntimeError("counts, too")
    monkeypatch.undo()
    assert timer.seconds == {**dict.fromkeys(STAGES, 0.0), "keys": 3.5, "rows": 1.0}
    assert timer.ends == {"keys": 22.5, "rows": 31.0}


def test_unknown_names_are_our_mistake() -> None:
    with pytest.raises(AssertionError):
        stage("no such stage")
