"""Reads hot and cold batches of data whose hot samples stand first."""

import itertools
from collections.abc import Iterator

from torchrec.datasets.utils import Batch

from fusedrec_torchrec.training.data.alternation import Alternation, Rates
from fusedrec_torchrec.training.data.loader import Loader

__all__ = ["SeparatedLoader"]


class SeparatedLoader:
    """Reads hot and cold batches in turn, of data that was sorted before (``separate``).

    Args:
        hot: batches of the hot samples.
        cold: batches of all others.
        rates: how they alternate.
    """

    def __init__(self, hot: Loader, cold: Loader, rates: Rates) -> None:
        self._hot, self._cold, self._rates = hot, cold, rates

    @property
    def batches(self) -> int:
        """Number of batches in an epoch."""
        return self._hot.batches + self._cold.batches

    @property
    def waited(self) -> float:
        """Seconds that callers have waited for batches."""
        return self._hot.waited + self._cold.waited

    def read(self, start: int, stop: int | None = None) -> Iterator[Batch]:
        """Yields batches from number ``start`` up to ``stop``, as ``Loader.read`` does."""
        epoch, skip = divmod(start, self.batches)
        streams: dict[bool, Iterator[Batch]] = {}
        number = start
        while stop is None or number < stop:
            first = epoch * self.batches
            kinds = iter(Alternation(self._hot.batches, self._cold.batches, self._rates, first))
            done = {True: 0, False: 0}
            for is_hot in itertools.islice(kinds, skip):
                done[is_hot] += 1
            for is_hot in kinds:
                if stop is not None and number == stop:
                    return
                if is_hot not in streams:
                    loader = self._hot if is_hot else self._cold
                    streams[is_hot] = loader.read(epoch * loader.batches + done[is_hot])
                yield next(streams[is_hot])
                number += 1
            epoch, skip = epoch + 1, 0
