"""Finds the hot rows of a workload, and the samples that need no others."""

from collections.abc import Iterator

import numpy as np

from fusedrec_torchrec.access.hot_set import HotSet
from fusedrec_torchrec.access.profile import sample_profile
from fusedrec_torchrec.access.samples import Samples, Source
from fusedrec_torchrec.bench.suite import WorkloadConfig, steps_alike
from fusedrec_torchrec.hot.options import HotOptions, HotRule

__all__ = ["HotWorkload"]

COUNTERS = 1 << 21
READ = 1 << 14


class HotWorkload:
    """Holds the access profile of a workload's data, and what follows from it."""

    def __init__(self, config: WorkloadConfig, source: Source) -> None:
        self._config = config
        self._source = source
        self.profile = sample_profile(source, 1.0, COUNTERS, progress=False)

    def _blocks(self) -> Iterator[Samples]:
        for start in range(0, self._source.samples, READ):
            yield self._source.read(start, min(start + READ, self._source.samples))

    def hot_set(self) -> HotSet:
        """Returns the most used rows."""
        return HotSet.most_used(self.profile, self._config.hot_rows)

    def hot_samples(self, count: int) -> Samples:
        """Returns the first samples that need hot rows only.

        Raises:
            ValueError: there are not so many.
        """
        hot_set, chosen, taken = self.hot_set(), [], 0
        for samples in self._blocks():
            hot = hot_set.hot_samples(samples, self._source.features.values())
            which = np.flatnonzero(hot)[: count - taken]
            taken += len(which)
            if len(which):
                chosen.append(samples.take(which))
        if taken < count:
            raise ValueError(
                f"workload {self._config.name!r}: {taken} of {self._source.samples} samples need "
                f"the {self._config.hot_rows} most used rows only, {count} are wanted: raise "
                "hot_rows or lower batch_size"
            )
        return Samples.concatenate(chosen)

    def options(self, system: str) -> HotOptions:
        """Returns the settings of a system with hot rows."""
        ids = self.hot_set().ids
        return HotOptions(
            tables={name: HotRule(ids=rows.tolist()) for name, rows in ids.items()},
            sync_every=steps_alike(system),
            hot_batches="hot_batches" in system,
        )
