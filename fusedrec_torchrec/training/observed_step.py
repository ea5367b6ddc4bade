"""Looks closely at one step of those between two records: its stages, and the load of this rank.

Only that step has hooks on its lookups and a timer for its stages.  Nothing in it waits for a
device, and all other steps are as they are without it.
"""

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from fusedrec_torchrec.core.stages import STAGES, StageTimer
from fusedrec_torchrec.exchange.context import ReceivedRows
from fusedrec_torchrec.training.logs import Value
from fusedrec_torchrec.training.metrics import ClickSums

__all__ = ["TIMES", "ObservedStep", "observing", "of_all_ranks"]

# The stages of the fused tables, the wait for a batch, and whatever is left of the step: the dense
# part, FBGEMM's update, the optimizer.
TIMES = (*STAGES, "data", "other")


@dataclass
class ObservedStep:
    """Holds what one step was like on this rank.

    Attributes:
        rows: rows that were looked up in this rank's tables, for all ranks.
        seconds: of each of ``TIMES``; empty on CUDA, where a stage ends before its work is done.
    """

    rows: int = 0
    seconds: dict[str, float] = field(default_factory=dict)

    def waited_for_data(self, seconds: float) -> None:
        """Tells how much of the step was a wait for a batch."""
        if self.seconds:
            self.seconds["data"] = seconds
            self.seconds["other"] = max(self.seconds["other"] - seconds, 0.0)


@contextmanager
def observing(lookups: Sequence[nn.Module], device: torch.device) -> Iterator[ObservedStep]:
    """Looks at the step that is done inside, and completes the answer when it is over."""
    observed = ObservedStep()

    def count(_: nn.Module, inputs: tuple[Any, ...]) -> None:
        observed.rows += _rows_of(inputs[0])

    with ExitStack() as stack:
        for lookup in lookups:
            stack.callback(lookup.register_forward_pre_hook(count).remove)
        timer = stack.enter_context(StageTimer())
        begun = time.perf_counter()
        yield observed
        whole = time.perf_counter() - begun
    if device.type == "cpu":
        known = timer.seconds
        observed.seconds = {**known, "data": 0.0, "other": max(whole - sum(known.values()), 0.0)}


def _rows_of(asked: Any) -> int:
    """Returns how many rows a lookup is asked for, by our sharding or by one of TorchRec's."""
    if isinstance(asked, ReceivedRows):
        return asked.context.rows_in()
    return int(asked.values().numel())


def of_all_ranks(
    sums: ClickSums, observed: ObservedStep | None, traffic: Mapping[str, float]
) -> tuple[dict[str, float], dict[str, Value]]:
    """Returns the metrics of all ranks and, from the same collective, what their steps were like.

    All ranks must call it, and look at the same steps.  It sends as many numbers in every record,
    so that sums do not depend on which steps were looked at.

    Args:
        sums: of the metrics.
        observed: the step that was looked at; None if there is none since the last record.
        traffic: of the step whose collectives were counted; empty if there is none.

    Returns:
        The metrics, and for the record ``rows_looked_up_by_rank``, ``bytes_sent_by_rank`` and
        ``stage_ms``, a mean of all ranks, as far as they are known.
    """
    seconds = {} if observed is None else observed.seconds
    own = [0 if observed is None else observed.rows, traffic.get("bytes_sent_per_step", 0)]
    quality, totals, by_rank = sums.compute_beside([seconds.get(n, 0.0) for n in TIMES], own)
    record: dict[str, Value] = {}
    if observed is not None:
        record["rows_looked_up_by_rank"] = [round(rows) for rows, _ in by_rank]
    if traffic:
        record["bytes_sent_by_rank"] = [round(sent) for _, sent in by_rank]
    if any(seconds.get(name) for name in STAGES):
        ms = {name: 1e3 * t / len(by_rank) for name, t in zip(TIMES, totals, strict=True)}
        record["stage_ms"] = {
            name: round(value, 4) for name, value in ms.items() if value or name == "data"
        }
    return quality, record
