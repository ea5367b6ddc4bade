"""What a rank says about its own batch, in one word of its messages."""

import torch
import torch.distributed as dist

from fusedrec_torchrec.core.all_ranks import listed_ranks
from fusedrec_torchrec.core.lost_rank import wait

__all__ = ["BAD", "END_OF_DATA", "Statuses", "check_end_of_data"]

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


def check_end_of_data(statuses: list[int]) -> None:
    """Refuses a step that only some ranks have a batch for.

    Raises:
        ValueError: some ranks have no batch for this step, but others have.
    """
    ended = [rank for rank, status in enumerate(statuses) if status == END_OF_DATA]
    if not ended or len(ended) == len(statuses):
        return
    others = [rank for rank in range(len(statuses)) if rank not in ended]
    raise ValueError(
        f"{listed_ranks(ended)} ran out of batches, {listed_ranks(others)} did not: all ranks must "
        "have the same number of batches. Leave the last ones out, or give a rank that has no more "
        "of them batches of no samples"
    )
