"""What a rank says about its own batch, in one word of its messages."""

import torch
import torch.distributed as dist

from fusedrec_torchrec.core.all_ranks import listed_ranks
from fusedrec_torchrec.core.lost_rank import wait

__all__ = ["BAD", "END_OF_DATA", "Statuses", "describe_uneven", "is_uneven"]

BAD = 1
END_OF_DATA = 2


class Statuses:
    """The status words of the ranks of all groups, on their way.

    Args:
        everyone: all ranks.
        status: of this rank, a 0-dim tensor.
    """

    def __init__(self, everyone: dist.ProcessGroup, status: torch.Tensor) -> None:
        self._everyone = everyone
        self._own = status.int().view(1)
        self._statuses = self._own.new_empty(everyone.size())
        self._work = dist.all_gather_single(
            self._statuses, self._own, group=everyone, async_op=True
        )

    def wait(self) -> torch.Tensor:
        """Returns the status of every rank, in rank order."""
        wait(self._work, self._everyone, "ids")
        return self._statuses


def is_uneven(statuses: list[int]) -> bool:
    """Returns whether some ranks have a batch for this step, and some have not."""
    return 0 < statuses.count(END_OF_DATA) < len(statuses)


def describe_uneven(statuses: list[int]) -> str:
    """Returns the error message for a step that only some ranks have a batch for."""
    ended = [rank for rank, status in enumerate(statuses) if status == END_OF_DATA]
    others = [rank for rank, status in enumerate(statuses) if status != END_OF_DATA]
    return (
        f"{listed_ranks(ended)} ran out of batches, {listed_ranks(others)} did not: all ranks must "
        "have the same number of batches. Leave the last ones out, or give a rank that has no more "
        "of them batches of no samples"
    )
