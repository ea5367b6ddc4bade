"""When a rank hangs or dies, all others raise an error that names the stage and the rank.

A collective that nobody answers ends after the timeout of its process group, or when a connection
breaks, with a text about sockets.  Ranks that come to this point tell each other through the store
of the process group where they wait.  Whoever has nothing to say is the one they wait for.  The
first rank that knows writes it down, and all raise the same error.  A rank that was stopped for a
while speaks, too, when it goes on: it has not given up waiting, as the others have.

All of this happens after the failure; a step that goes well pays nothing.
"""

import json
import os
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.distributed as dist

from fusedrec_torchrec.compat.process_groups import default_store, timeout_of
from fusedrec_torchrec.core.all_ranks import listed_ranks

__all__ = ["LostRankError", "explained", "first_line", "wait", "waiting"]

MOST_GRACE_SECONDS = 10.0
BROKEN_GRACE_SECONDS = 3.0  # all see at once that a connection is gone
ACK_SECONDS = 3.0
COMMUNICATION = re.compile(
    r"gloo|nccl|timed? ?out|connection (closed|reset|refused)|broken pipe|recv|process group",
    re.IGNORECASE,
)
TIMEOUT = re.compile(r"timed? ?out", re.IGNORECASE)
ADVICE = (
    "A rank that does not answer hangs, is stopped or swapped out, or is in another collective: "
    "look at its process and its output, then go on from the last checkpoint. If it was only slow, "
    "raise the timeout of the process group (launch.timeout_seconds, or timeout of "
    "init_process_group)"
)


class LostRankError(RuntimeError):
    """A rank did not answer; the text says which one, and in which stage others waited for it."""


def wait(work: dist.Work, pg: dist.ProcessGroup | None, stage: str) -> None:
    """Waits for a collective, and says which rank is missing if it fails.

    Args:
        work: the collective.
        pg: its process group; all ranks if None.
        stage: of the step, for the error.

    Raises:
        LostRankError: a rank did not answer.
    """
    with waiting(pg, stage):
        work.wait()


@contextmanager
def waiting(pg: dist.ProcessGroup | None, stage: str) -> Iterator[None]:
    """Does what ``wait`` does, for a collective that is called inside of this context."""
    try:
        yield
    except RuntimeError as error:
        raise explained(error, pg, stage) from error


def _is_communication_error(error: BaseException) -> bool:
    """Tells whether an error looks like that of a rank that is lost."""
    if isinstance(error, LostRankError | dist.DistBackendError | dist.DistNetworkError):
        return True
    return isinstance(error, RuntimeError) and COMMUNICATION.search(str(error)) is not None


def explained(
    error: RuntimeError, pg: dist.ProcessGroup | None = None, stage: str = "unknown"
) -> RuntimeError:
    """Returns the error that says which rank is missing; the same if it is about something else."""
    if isinstance(error, LostRankError) or not _is_communication_error(error):
        return error
    try:
        ranks = dist.get_process_group_ranks(pg or dist.group.WORLD)
        grace = _grace(pg) if TIMEOUT.search(str(error)) else BROKEN_GRACE_SECONDS
        return LostRankError(_Incident(ranks, stage, error, grace).verdict())
    except Exception as problem:  # the store may be gone with the rank
        return LostRankError(
            f"stage {stage!r}: a rank did not answer, and who it is cannot be found out, for the "
            "store of the process group, which rank 0 or its launcher holds, does not answer "
            "either "
            f"({first_line(problem)}): {first_line(error)}. {ADVICE}"
        )


def _grace(pg: dist.ProcessGroup | None) -> float:
    """Returns the seconds to wait for other ranks, which began to wait at different times."""
    try:
        timeout = timeout_of(pg, torch.device("cpu")).total_seconds()
    except (AttributeError, RuntimeError):  # another backend
        return MOST_GRACE_SECONDS
    return min(MOST_GRACE_SECONDS, max(timeout / 2, 1.0))


@dataclass(frozen=True)
class _Statement:
    """What a rank says: in which stage it waited, and whether it gave up or a connection broke."""

    stage: str
    gave_up: bool


class _Incident:
    """Finds out, with the other ranks, for whom they wait in vain.

    Args:
        ranks: that should have answered.
        stage: in which this rank waits.
        error: that the collective ended with.
        grace: seconds that ranks wait for each other's statement.
    """

    def __init__(self, ranks: list[int], stage: str, error: RuntimeError, grace: float) -> None:
        self._ranks, self._stage, self._error, self._grace = ranks, stage, error, grace
        self._rank = dist.get_rank()
        self._store: Any = default_store()
        # Ranks that are started again may meet the statements of the round before in the store.
        self._key = f"fusedrec/lost/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"

    def verdict(self) -> str:
        """Returns what all ranks agree on: what the first of them has found out."""
        own = _Statement(self._stage, TIMEOUT.search(str(self._error)) is not None)
        self._store.set(f"{self._key}/{self._rank}", json.dumps(asdict(own)))
        said = self._listen()
        if not self._store.check([f"{self._key}/verdict"]):
            self._store.compare_set(f"{self._key}/verdict", "", json.dumps(self._describe(said)))
        text: str = json.loads(self._store.get(f"{self._key}/verdict"))
        self._store.set(f"{self._key}/heard/{self._rank}", "1")
        if self._rank == 0:  # the store may live here: others must have read it
            self._until(lambda: all(self._has(f"heard/{r}") for r in said), ACK_SECONDS)
        return text

    def _listen(self) -> dict[int, _Statement]:
        """Returns statements by rank, of all that speak in time; it ends early if all is known."""
        self._until(
            lambda: self._has("verdict") or all(self._has(str(r)) for r in self._ranks),
            self._grace,
        )
        return {
            rank: _Statement(**json.loads(self._store.get(f"{self._key}/{rank}")))
            for rank in range(dist.get_world_size())
            if self._has(str(rank))
        }

    def _has(self, what: str) -> bool:
        return bool(self._store.check([f"{self._key}/{what}"]))

    def _until(self, done: Any, seconds: float) -> None:
        end = time.monotonic() + seconds
        while not done() and time.monotonic() < end:
            time.sleep(0.05)

    def _describe(self, said: dict[int, _Statement]) -> str:
        where = f"stage {self._stage!r}"
        stages = sorted({statement.stage for statement in said.values()})
        if len(stages) > 1:
            where += " (" + ", ".join(
                listed_ranks([r for r, statement in said.items() if statement.stage == stage])
                + f" in {stage!r}"
                for stage in stages
            ) + ")"  # fmt: skip
        missing = [rank for rank in self._ranks if rank not in said]
        there = [rank for rank in self._ranks if rank in said]
        gave_up = [rank for rank in there if said[rank].gave_up]
        if missing and gave_up:
            return (
                f"{where}: {listed_ranks(missing)} did not answer in time; {listed_ranks(there)} "
                f"waited for it. {ADVICE}"
            )
        if missing:
            return (
                f"{where}: {listed_ranks(missing)} is gone: its connection broke; "
                f"{listed_ranks(there)} waited for it. See what it has written, and whether the "
                "system has killed it (out of memory), then go on from the last checkpoint"
            )
        late = [rank for rank in there if rank not in gave_up]
        if gave_up and late:
            return (
                f"{where}: {listed_ranks(late)} did not answer in time and came when "
                f"{listed_ranks(gave_up)} had given up. {ADVICE}"
            )
        if gave_up:
            return (
                f"{where}: all ranks are there, but each waited in vain for another one. {ADVICE}"
            )
        return (
            f"{where}: all ranks are there, but a connection between them broke: "
            f"{first_line(self._error)}. Look for errors of the network, then go on from the last "
            "checkpoint"
        )


def first_line(error: BaseException) -> str:
    """Returns what an error says first; those of gloo and of the store go on for pages."""
    return str(error).strip().partition("\n")[0] or type(error).__name__
