"""Another hot set while training goes on, the same on all ranks at the same batch.

Each rank counts in how many of its batches a row is, since that is what the row costs on the wire.
Every so many batches the ranks put their counts together, and all come to the same new hot set.
"""

import torch
import torch.distributed as dist

from fusedrec_torchrec.access.heavy_hitters import HeavyHitters
from fusedrec_torchrec.core.lost_rank import wait
from fusedrec_torchrec.exchange.layout import ExchangeLayout
from fusedrec_torchrec.hot.index import EMPTY, HotIndex
from fusedrec_torchrec.hot.options import AdaptOptions

__all__ = ["Adaptation", "next_home_keys"]


class Adaptation:
    """Chooses hot sets by what all ranks have counted.

    Args:
        pg: the process group in which ids travel: counts are put together between two of their
            messages, and must not meet anything else.
        layout: with room for the hot rows.
        options: the user's settings.
    """

    def __init__(
        self, pg: dist.ProcessGroup, layout: ExchangeLayout, options: AdaptOptions
    ) -> None:
        self._pg = pg
        self._layout = layout
        self._options = options
        # On CUDA, unique keys are followed by as many of these as it takes (``Unique``).
        self._hitters = HeavyHitters(options.counters, layout.device, padding=layout.key_space)
        self._batches = 0
        self._counts: _Counts | None = None  # of all ranks, on their way

    def count(self, keys_U: torch.Tensor, index: HotIndex) -> None:
        """Takes a batch's unique keys; every so many batches, sends counts to all ranks.

        Args:
            keys_U: as dedup gives them.
            index: that they were routed by.
        """
        self._batches += 1
        if self._batches % self._options.sample == 0:
            self._hitters.add(index.homes_of(keys_U))
        if self._batches % self._options.every == 0:
            self._counts = _Counts(self._pg, *self._hitters.content(), self._options.counters)
            self._hitters.fade(self._options.decay)

    def answer(self) -> None:
        """Gives other ranks the counts that they may wait for, on a rank that has no batch.

        If there are such ranks the step ends with an error, and if there are none nobody has
        counted anything: so nothing changes here.
        """
        if (self._batches + 1) % self._options.every == 0:
            _Counts(self._pg, *self._hitters.content(), self._options.counters)

    def forget(self) -> None:
        """Counts batches anew, as all ranks do at the same time."""
        self._batches, self._counts = 0, None

    def next_index(self, index: HotIndex) -> HotIndex | None:
        """Returns the hot set for the next batch if it is another one.

        Waits for counts that are on their way, which every rank has sent.

        Args:
            index: the hot set of the batches so far.
        """
        if self._counts is None:
            return None
        keys, counts = self._counts.wait()
        self._counts = None
        layout = self._layout
        starts_P1 = layout.part_starts_P1.tolist()
        first_parts = [k * layout.owners for k in range(len(layout.buckets))]
        home_keys = []
        for k, before in enumerate(index.home_keys):
            begin, end = starts_P1[first_parts[k]], starts_P1[first_parts[k] + layout.world_size]
            inside = (keys >= begin) & (keys < end)
            home_keys.append(
                next_home_keys(before, keys[inside], counts[inside], self._options.margin)
            )
        if all(
            torch.equal(before, after)
            for before, after in zip(index.home_keys, home_keys, strict=True)
        ):
            return None
        return HotIndex(layout, home_keys, index.version + 1)


class _Counts:
    """Keys and their counts on all ranks, on their way.

    Args:
        pg: the process group.
        keys: that this rank has counted.
        counts: of each of them.
        room: how many keys a rank may have.
    """

    def __init__(
        self, pg: dist.ProcessGroup, keys: torch.Tensor, counts: torch.Tensor, room: int
    ) -> None:
        self._pg = pg
        self._own = torch.full((2, room), EMPTY, dtype=torch.int64, device=keys.device)
        self._own[0, : keys.numel()] = keys
        self._own[1, : keys.numel()] = counts
        self._everywhere = self._own.new_empty(pg.size() * self._own.numel())
        self._work = dist.all_gather_single(
            self._everywhere, self._own.view(-1), group=pg, async_op=True
        )

    def wait(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns keys and their counts over all ranks, on the host."""
        wait(self._work, self._pg, "hot set")
        room = self._own.size(1)
        keys, counts = self._everywhere.view(-1, 2, room).transpose(0, 1).reshape(2, -1).cpu()
        used = keys != EMPTY
        keys, inverse = torch.unique(keys[used], return_inverse=True)
        return keys, torch.zeros_like(keys).scatter_add_(0, inverse, counts[used])


def next_home_keys(
    before_H: torch.Tensor, keys_C: torch.Tensor, counts_C: torch.Tensor, margin: float
) -> torch.Tensor:
    """Decides which row takes which place next: the most used ones; those that stay keep theirs.

    Args:
        before_H: the key in each place, or ``EMPTY``.
        keys_C: keys that were counted, ascending.
        counts_C: their counts.
        margin: a row must be counted this many times as often as the row it replaces.
    """
    places = before_H.numel()
    lived = before_H[before_H != EMPTY]
    candidates = torch.unique(torch.cat([keys_C, lived]))
    scores = torch.zeros(candidates.numel(), dtype=torch.float64)
    scores[torch.searchsorted(candidates, keys_C)] = counts_C.double()
    is_in = torch.isin(candidates, lived)
    # A row that was not counted stays for want of a better one, and nobody comes in uncounted.
    scores = torch.where(is_in, scores * margin + 1e-9, scores)
    order = torch.argsort(scores, descending=True, stable=True)
    order = order[scores[order] > 0][:places]
    chosen = candidates[order]
    after_H = torch.where(torch.isin(before_H, chosen), before_H, EMPTY)
    coming = chosen[~torch.isin(chosen, before_H)].sort().values
    free = (after_H == EMPTY).nonzero().flatten()[: coming.numel()]
    after_H[free] = coming
    # A free place that nobody wants goes on with who was there.
    return torch.where((after_H == EMPTY) & ~torch.isin(before_H, after_H), before_H, after_H)
