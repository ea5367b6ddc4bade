"""Counts how often rows are used, in bounded memory, and makes an access profile of the counts."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from fusedrec_torchrec.access.access_profile import AccessProfile
from fusedrec_torchrec.access.bag_counts import BagCounter, CountedBags
from fusedrec_torchrec.access.heavy_hitters import HeavyHitters

__all__ = ["Recorder", "merged"]


class Recorder:
    """Counts accesses.

    Args:
        table_rows: rows of each table.
        counters: how many rows to count at a time, of all tables together.
    """

    def __init__(self, table_rows: Mapping[str, int], counters: int) -> None:
        self._rows = dict(table_rows)
        self._starts = np.cumsum([0, *self._rows.values()])
        self._hitters = HeavyHitters(counters)
        self._accesses = dict.fromkeys(self._rows, 0)
        self._samples = 0
        self._bags: dict[str, BagCounter] = {}
        self._merged_bags: dict[str, CountedBags] = {}

    def add(
        self,
        ids: Sequence[NDArray[np.int64]],
        samples: int,
        lengths: Iterable[NDArray[np.integer[Any]]] | None = None,
    ) -> None:
        """Counts the ids of some samples, table by table.

        Args:
            ids: of each table.
            samples: how many they are of.
            lengths: ids of the bags of each table, feature by feature; None if every bag has one.
        """
        if lengths is not None:
            for name, drawn, of_bags in zip(self._rows, ids, lengths, strict=True):
                bags = self._bags.setdefault(name, BagCounter())
                bags.add(drawn, of_bags.astype(np.int64), samples)
        self._samples += samples
        for name, start, drawn in zip(self._rows, self._starts[:-1], ids, strict=True):
            self._accesses[name] += len(drawn)
            self._hitters.add(torch.from_numpy(drawn + start))

    def add_profile(self, profile: AccessProfile) -> None:
        self._samples += profile.samples
        keys, counts = [], []
        for name, start in zip(self._rows, self._starts[:-1], strict=True):
            self._accesses[name] += profile.accesses[name]
            if name in profile.bags:
                before = self._merged_bags.get(name)
                bags = profile.bags[name]
                self._merged_bags[name] = bags if before is None else before.plus(bags)
            keys.append(torch.from_numpy(profile.ids[name] + start))
            counts.append(torch.from_numpy(profile.counts[name]))
        self._hitters.merge(
            torch.cat(keys), torch.cat(counts), sum(profile.accesses.values()), profile.error
        )

    def profile(self, of_samples: int = 0) -> AccessProfile:
        """Returns what was counted.

        Args:
            of_samples: how many samples there are, counted or not.
        """
        keys, counts = (tensor.numpy() for tensor in self._hitters.content())
        tables = np.searchsorted(self._starts, keys, side="right") - 1
        places = [tables == t for t in range(len(self._rows))]
        named = list(zip(self._rows, self._starts[:-1], places, strict=True))
        return AccessProfile(
            table_rows=self._rows,
            samples=self._samples,
            accesses=dict(self._accesses),
            ids={name: keys[place] - start for name, start, place in named},
            counts={name: counts[place] for name, _, place in named},
            error=self._hitters.error,
            counters=self._hitters.counters,
            of_samples=of_samples,
            bags=self._counted_bags(),
        )

    def _counted_bags(self) -> dict[str, CountedBags]:
        """Returns the distinct bags of tables that have bags of several ids."""
        counted = dict(self._merged_bags)
        for name, counter in self._bags.items():
            bags = counter.result()
            counted[name] = counted[name].plus(bags) if name in counted else bags
        # Bags of one id are as distinct as rows, which are known.
        return {name: bags for name, bags in counted.items() if bags.all_ids > bags.all_bags}


def merged(profiles: Sequence[AccessProfile]) -> AccessProfile:
    """Returns profiles of different samples of the data as one profile of all of them.

    Raises:
        ValueError: the profiles are of different tables.
    """
    first = profiles[0]
    for profile in profiles[1:]:
        if profile.table_rows != first.table_rows:
            raise ValueError("profiles to merge must be of the same tables and rows")
    recorder = Recorder(first.table_rows, max(profile.counters for profile in profiles))
    for profile in profiles:
        recorder.add_profile(profile)
    return recorder.profile(sum(profile.of_samples for profile in profiles))
