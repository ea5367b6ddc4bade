"""Learning-rate schedules, by their figures."""

from collections.abc import Mapping

import pytest
import torch
from torchrec.optim.keyed import KeyedOptimizerWrapper
from torchrec.optim.warmup import WarmupOptimizer

from fusedrec_torchrec.core.config import from_mapping
from fusedrec_torchrec.training.config import ScheduleConfig
from fusedrec_torchrec.training.optimizers import schedule_stages


def rates(schedule: Mapping[str, float], steps: int, run: int) -> list[float]:
    """The learning rate of each step, base 1."""
    parameter = torch.nn.Parameter(torch.zeros(1))
    wrapped = KeyedOptimizerWrapper({"p": parameter}, lambda p: torch.optim.SGD(p, lr=1.0))
    stages = schedule_stages(from_mapping(ScheduleConfig, schedule), steps)
    optimizer = WarmupOptimizer(wrapped, stages, lr=1.0)
    found = []
    for _ in range(run):
        found.append(float(optimizer.param_groups[0]["lr"]))
        parameter.grad = torch.ones(1)
        optimizer.step()
    assert parameter.item() == pytest.approx(-sum(found), rel=1e-6)  # they are really applied
    return found


def test_no_schedule_is_constant() -> None:
    assert rates({}, 10, 15) == [1.0] * 15


def test_warm_up_rises_linearly_to_the_full_rate_and_stays() -> None:
    assert rates({"warmup_steps": 4, "warmup_start": 0.2}, 10, 8) == pytest.approx(
        [0.2, 0.4, 0.6, 0.8, 1.0, 1.0, 1.0, 1.0]
    )


def test_decay_falls_linearly_to_its_factor_and_stays_there() -> None:
    schedule = {"decay_start": 2, "decay_end": 6, "decay_factor": 0.2}
    assert rates(schedule, 20, 12) == pytest.approx([1, 1, 1, 0.8, 0.6, 0.4, *[0.2] * 6])


def test_decay_ends_with_the_run_and_may_follow_the_warm_up_at_once() -> None:
    schedule = {"warmup_steps": 2, "warmup_start": 0, "decay_start": 2, "decay_factor": 0}
    assert rates(schedule, 6, 8) == pytest.approx([0, 0.5, 1, 0.75, 0.5, 0.25, 0, 0])


def test_a_decay_after_the_run_does_not_happen() -> None:
    assert rates({"decay_start": 10}, 10, 12) == [1.0] * 12
