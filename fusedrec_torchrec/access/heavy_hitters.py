"""Which keys are used most, in bounded memory.

Misra and Gries' summary in its mergeable form (Agarwal et al., PODS 2012): at most C counters; when
there are more keys than that, the largest count that has no place is subtracted from all.  So a
count is never too high, and too low by at most ``error``, which is at most total / (C + 1); every
key that is used more often than that is in the summary.
"""

import torch

__all__ = ["HeavyHitters"]


class HeavyHitters:
    """Summarizes a stream of keys: which are used most, and how often.

    Args:
        counters: C, how many keys are counted at a time.
        device: of the keys.
        padding: a key above all others that is none, and does not count; there is none if None.

    Attributes:
        total: sum of all counts that were added.
        error: how much too low a count can be.
    """

    def __init__(
        self, counters: int, device: torch.device | None = None, padding: int | None = None
    ) -> None:
        if counters < 1:
            raise ValueError(f"counters is {counters}, must be at least 1")
        self.counters = counters
        self._padding = padding
        self._keys = torch.empty(0, dtype=torch.int64, device=device)
        self._counts = torch.empty(0, dtype=torch.int64, device=device)
        self._waiting: list[torch.Tensor] = []
        self._waiting_keys = 0
        self.total = 0
        self.error = 0

    def add(self, keys: torch.Tensor) -> None:
        """Counts every key once for each time it occurs."""
        self._waiting.append(keys.long())
        self._waiting_keys += keys.numel()
        self.total += keys.numel()
        if self._waiting_keys >= self.counters:
            self._summarize()

    def merge(self, keys: torch.Tensor, counts: torch.Tensor, total: int, error: int) -> None:
        """Adds another summary's content."""
        self._summarize()
        self.total += total
        self.error += error
        self._combine([self._keys, keys], [self._counts, counts])

    def content(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns keys and counts, the largest first, equal ones by key."""
        self._summarize()
        order = torch.argsort(self._counts, descending=True, stable=True)  # keys are in order
        return self._keys[order], self._counts[order]

    def fade(self, factor: float) -> None:
        """Multiplies all counts by a factor, so that old ones count less."""
        self._summarize()
        self._counts = (self._counts * factor).long()
        kept = self._counts > 0
        self._keys, self._counts = self._keys[kept], self._counts[kept]
        self.total, self.error = int(self.total * factor), int(self.error * factor) + 1

    def _summarize(self) -> None:
        if not self._waiting:
            return
        keys, counts = torch.unique(torch.cat(self._waiting), return_counts=True)
        self._waiting, self._waiting_keys = [], 0
        if self._padding is not None and keys.numel():
            # Only here, where the host waits for the device anyway.
            key, count = torch.stack([keys[-1], counts[-1]]).tolist()
            if key == self._padding:
                self.total -= count
                keys, counts = keys[:-1], counts[:-1]
        self._combine([self._keys, keys], [self._counts, counts])

    def _combine(self, keys: list[torch.Tensor], counts: list[torch.Tensor]) -> None:
        self._keys, inverse = torch.unique(torch.cat(keys), return_inverse=True)
        self._counts = torch.zeros_like(self._keys).scatter_add_(0, inverse, torch.cat(counts))
        excess = self._keys.numel() - self.counters
        if excess > 0:
            largest_without_place = int(self._counts.kthvalue(excess).values)
            self.error += largest_without_place
            self._counts -= largest_without_place
            kept = self._counts > 0
            self._keys, self._counts = self._keys[kept], self._counts[kept]
