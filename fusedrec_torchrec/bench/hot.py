"""Hot rows of a workload: its most used rows, and the samples that need no others."""

import numpy as np

from fusedrec_torchrec.bench.suite import WorkloadConfig, steps_alike
from fusedrec_torchrec.data.access_profile import AccessProfile, Recorder
from fusedrec_torchrec.data.hot_set import HotSet, ids_by_feature
from fusedrec_torchrec.data.samples import Samples, Source
from fusedrec_torchrec.hot.options import HotOptions, HotRule

__all__ = ["HotWorkload"]

COUNTERS = 1 << 21
READ = 1 << 14


class HotWorkload:
    """The access profile of a workload's data, and what follows from it."""

    def __init__(self, config: WorkloadConfig, source: Source) -> None:
        self._config = config
        self._source = source
        recorder = Recorder(source.table_rows, COUNTERS)
        for samples in self._blocks():
            recorder.add(list(ids_by_feature(samples, len(source.table_rows))), len(samples))
        self.profile: AccessProfile = recorder.profile()

    def _blocks(self) -> list[Samples]:
        ends = range(READ, self._source.samples + READ, READ)
        return [self._source.read(end - READ, min(end, self._source.samples)) for end in ends]

    def hot_set(self) -> HotSet:
        """The most used rows."""
        return HotSet.most_used(self.profile, self._config.hot_rows)

    def hot_samples(self, count: int) -> Samples:
        """The first samples that need hot rows only.

        Raises:
            ValueError: there are not so many.
        """
        hot_set, found, taken = self.hot_set(), [], 0
        for samples in self._blocks():
            which = np.flatnonzero(hot_set.hot_samples(samples))[: count - taken]
            taken += len(which)
            if len(which):
                found.append(samples.take(which))
        if taken < count:
            raise ValueError(
                f"workload {self._config.name!r}: {taken} of {self._source.samples} samples need "
                f"the {self._config.hot_rows} most used rows only, {count} are wanted: raise "
                "hot_rows or lower batch_size"
            )
        return Samples.concatenate(found)

    def options(self, system: str) -> HotOptions:
        """Settings of a system with hot rows."""
        ids = self.hot_set().ids
        return HotOptions(
            tables={name: HotRule(ids=rows.tolist()) for name, rows in ids.items()},
            sync_every=steps_alike(system),
            hot_batches="hot_batches" in system,
        )
