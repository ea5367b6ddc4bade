"""The threshold that a wanted share of numbers reaches, renewed now and then.

Dynamic communication thresholding (DCT, KDD 2021) sends the entries of a tensor whose magnitude is
at least tau, the threshold.  To find the k-th largest of all entries in every step would cost more
than it saves; tau hardly changes from step to step, so it is found anew every so many steps only,
from a sample.
"""

from collections.abc import Callable, Sequence

import torch

from fusedrec_torchrec.core.transfer import ToHost

__all__ = ["Threshold", "quantile"]

SAMPLE = 1 << 16
PRIME = 2_654_435_761


def quantile(values: torch.Tensor, density: float) -> torch.Tensor:
    """Returns the magnitude that a share ``density`` of the values reaches.

    It is estimated from a sample, as a 0-dim tensor, without waiting for a device.
    """
    flat = values.reshape(-1)
    if flat.numel() > SAMPLE:
        # In steps of a large prime: it visits all columns of a matrix alike, whatever their number.
        steps = torch.arange(SAMPLE, device=flat.device)
        flat = flat.index_select(0, steps.mul_(PRIME).remainder_(flat.numel()))
    sample = flat.abs()
    rank = min(int((1 - density) * sample.numel()), sample.numel() - 1) + 1
    return sample.kthvalue(rank).values


class Threshold:
    """The threshold (tau) of one tensor or bucket, on one rank.

    Args:
        density: share of entries that should reach it.
        every: steps from one renewal to the next.
    """

    def __init__(self, density: float, every: int) -> None:
        self.density = density
        self.every = every
        self._tau: torch.Tensor | None = None
        self._age = 0  # steps since it was renewed
        self._doubt: tuple[ToHost, Callable[[list[int]], bool]] | None = None

    def __call__(self, values: torch.Tensor, training: bool = True) -> torch.Tensor:
        """Returns tau for these values, on their device, and renews it if that is due.

        Args:
            values: to which it is applied.
            training: whether this is a step of training; others see tau, but do not make it older.
        """
        self._settle()
        if not values.numel():
            return values.new_zeros(()) if self._tau is None else self._tau
        if self._tau is None or self.is_due(training):
            tau = quantile(values.detach(), self.density).float()
            if not training:
                return tau
            self._tau, self._age = tau, 0
        self._age += training
        self._tau = self._tau.to(values.device)  # a state may have been loaded from elsewhere
        return self._tau

    def expire(self) -> None:
        """Makes the next step renew it."""
        self._age = self.every

    def expire_unless(self, counts: ToHost, is_fine: Callable[[list[int]], bool]) -> None:
        """Makes the next step renew it if counts, which are on their way, are not fine."""
        self._doubt = counts, is_fine

    def _settle(self) -> None:
        """Looks at the counts that have been on their way."""
        if self._doubt is not None:
            (counts, is_fine), self._doubt = self._doubt, None
            if not is_fine(counts.numbers()):
                self.expire()

    def is_due(self, training: bool) -> bool:
        """Tells whether the next call will look for a new one."""
        self._settle()
        return self._tau is None or (training and self._age >= self.every)

    @property
    def tau(self) -> torch.Tensor | None:
        """The current threshold, 0-dim; None before the first step."""
        return self._tau

    def snapshot(self) -> tuple[torch.Tensor | None, int]:
        """Returns what ``restore`` takes back; it stays on its device."""
        self._settle()
        return self._tau, self._age

    def restore(self, snapshot: tuple[torch.Tensor | None, int]) -> None:
        """Goes back to a ``snapshot``."""
        self._doubt = None
        self._tau, self._age = snapshot

    def state(self) -> torch.Tensor:
        """Returns tau, or NaN if there is none yet, and the steps since it was renewed."""
        self._settle()
        tau = torch.tensor(torch.nan) if self._tau is None else self._tau.cpu()
        return torch.stack([tau.double(), torch.tensor(float(self._age)).double()])

    def load(self, states: Sequence[torch.Tensor]) -> None:
        """Takes over a state.

        Of the states of several ranks it takes the mean tau and the greatest age; of none, no tau.
        """
        self._doubt = None
        if not states:
            self._tau, self._age = None, 0
            return
        states_K2 = torch.stack([state.cpu() for state in states])
        tau, age = states_K2.nanmean(0)[0], float(states_K2[:, 1].max())
        self._tau = None if bool(tau.isnan()) else tau.float()
        self._age = int(age)
