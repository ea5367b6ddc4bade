"""Names the stages of a step, marks them in PyTorch's profiler, and times them.

Every station of the data path wraps its work in ``stage(name)``.  In a profile the stages appear
as ``fusedrec::name``; a ``StageTimer`` sums up the wall-clock time of each.
"""

import time
from types import TracebackType
from typing import Final

from torch.profiler import record_function

from fusedrec_torchrec.compat.profiler import profiler_is_on

__all__ = ["STAGES", "StageTimer", "stage"]

STAGES: Final = (
    "check",  # the batch's names, shapes and types
    "keys",  # ids to keys of the fused key space
    "dedup",
    "route",  # unique keys to owners
    "bags",  # which row goes where in the output
    "ids",  # pack, send and unpack the id messages
    "lookup",
    "rows",  # wait for rows
    "early_rows",  # find and send rows of the next batch that are final already
    "hot_rows",  # the last step's update of the hot rows, and their lookup
    "pooling",
    "backward_pooling",
    "hot_gradients",  # start their exchange
    "gradients",  # wait for gradients
)


class StageTimer:
    """Sums up the wall-clock time of each stage on this rank, while it is active; one at a time.

    Work on a GPU is not waited for: there, use PyTorch's profiler.
    """

    _active: "StageTimer | None" = None

    def __init__(self) -> None:
        self.seconds: dict[str, float] = dict.fromkeys(STAGES, 0.0)
        self.ends: dict[str, float] = {}

    def __enter__(self) -> "StageTimer":
        assert StageTimer._active is None, "stage timers do not nest"
        StageTimer._active = self
        return self

    def __exit__(self, *_: object) -> None:
        StageTimer._active = None

    def add(self, name: str, begun: float, ended: float) -> None:
        """Adds the time of one stage."""
        self.seconds[name] += ended - begun
        self.ends[name] = ended


class stage:  # noqa: N801 - reads as a statement
    """Marks and times what is done inside of it as one stage of a step."""

    __slots__ = ("_begun", "_name", "_record")

    def __init__(self, name: str) -> None:
        assert name in STAGES, name
        self._name = name
        # Marks cost more than a small stage itself: only when somebody looks.
        self._record = record_function(f"fusedrec::{name}") if profiler_is_on() else None

    def __enter__(self) -> None:
        if self._record is not None:
            self._record.__enter__()
        self._begun = time.perf_counter()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if StageTimer._active is not None:
            StageTimer._active.add(self._name, self._begun, time.perf_counter())
        if self._record is not None:
            self._record.__exit__(kind, error, traceback)
