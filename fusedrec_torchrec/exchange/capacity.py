"""How much room the messages with ids have; all ranks know it without asking."""

import math
from typing import TypeVar

import torch

from fusedrec_torchrec.exchange.options import ExchangeOptions

__all__ = ["Capacity"]

GRANULE = 64
SLACK_ONE = 1 << 16  # what 1.0 is, in whole numbers
Count = TypeVar("Count", int, torch.Tensor)


class Capacity:
    """The room of a message, in ids; the same on all ranks in every step.

    It only depends on the ``wanted`` values of the headers, which all ranks have in common.
    It grows at once and shrinks slowly, so that a small batch does not make the next one
    overflow.
    """

    def __init__(self, options: ExchangeOptions) -> None:
        self._exact = options.input_dist == "exact_counts"
        self._slack = round((1 + options.capacity_slack) * SLACK_ONE)
        self.current = 0

    @property
    def rule(self) -> tuple[int, int]:
        """What ``wanted`` rounds up to, and the slack in 65536ths; 0 if nothing is wanted."""
        return GRANULE, 0 if self._exact else self._slack

    def wanted(self, largest_count: Count) -> Count:
        """Returns what a rank asks for whose fullest message holds ``largest_count`` ids.

        In whole numbers, and for numbers on the host as for those on a device.
        """
        if self._exact:
            return largest_count * 0
        granules = (largest_count * self._slack + SLACK_ONE * GRANULE - 1) // (SLACK_ONE * GRANULE)
        return granules * GRANULE

    def clear(self) -> None:
        """Begins anew, with no room: the next message is but a header."""
        self.current = 0

    def update(self, largest_wanted: int) -> None:
        """Takes the largest number that any rank has asked for in this step."""
        decayed = math.floor(self.current * 15 / 16 / GRANULE) * GRANULE
        self.current = max(largest_wanted, decayed)
