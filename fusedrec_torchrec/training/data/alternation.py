"""Lets hot and cold batches alternate: FAE's scheduler.

FAE (VLDB 2022) trains some share of the hot batches, then the same share of the cold ones, and so
on; the share is the *rate*.  A low rate mixes well, a high one switches seldom.  The adaptive
scheduler starts with a rate, halves it when the evaluation loss has risen, and doubles it when the
loss has fallen four times in a row.

Where a run stands follows from the numbers of batches and the rates so far alone, so that is all a
checkpoint needs.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

__all__ = ["Alternation", "Rates"]

PATIENCE = 4
LEAST_RATE, HIGHEST_RATE = 1 / 64, 1.0


@dataclass
class Rates:
    """Is the rate at which hot and cold batches alternate, from each batch on.

    Attributes:
        adaptive: whether evaluations change it.
        changes: (number of a batch, rate from there on), the first from batch 0.
        losses: of the evaluations so far.
    """

    adaptive: bool
    changes: list[tuple[int, float]]
    losses: list[float] = field(default_factory=list)

    def at(self, batch: int) -> float:
        """Returns the rate at a batch, counted over epochs."""
        return next(rate for first, rate in reversed(self.changes) if first <= batch)

    def evaluated(self, batch: int, loss: float) -> None:
        """Takes the loss of an evaluation before a batch."""
        if not self.adaptive:
            return
        self.losses.append(loss)
        rate = self.changes[-1][1]
        if len(self.losses) > 1 and loss > self.losses[-2]:
            self._change(batch, max(rate / 2, LEAST_RATE))
            self.losses = [loss]
        elif len(self.losses) > PATIENCE:
            self._change(batch, min(rate * 2, HIGHEST_RATE))
            self.losses = [loss]

    def state(self) -> dict[str, Any]:
        """Returns what a checkpoint has to keep."""
        return {"changes": self.changes, "losses": self.losses}

    def load(self, state: Mapping[str, Any]) -> None:
        """Takes over what ``state`` has returned."""
        self.changes = [(first, rate) for first, rate in state["changes"]]
        self.losses = list(state["losses"])

    def _change(self, batch: int, rate: float) -> None:
        self.changes = [(first, r) for first, r in self.changes if first < batch]
        self.changes.append((batch, rate))


class Alternation:
    """Is the order of some hot and some cold batches.

    Args:
        hot: number of hot batches.
        cold: number of cold batches.
        rates: the rates.
        first: number of the first of these batches, counted over epochs.
    """

    def __init__(self, hot: int, cold: int, rates: Rates, first: int = 0) -> None:
        self._totals = {False: cold, True: hot}
        self._rates = rates
        self._first = first

    def __iter__(self) -> Iterator[bool]:
        """Yields whether each batch is a hot one; cold ones begin, which see all of the tables."""
        done = {False: 0, True: 0}
        progress = 0.0
        while progress < 1:
            progress = min(progress + self._rates.at(self._first + sum(done.values())), 1.0)
            for is_hot, total in self._totals.items():
                while done[is_hot] < round(total * progress):
                    done[is_hot] += 1
                    yield is_hot
