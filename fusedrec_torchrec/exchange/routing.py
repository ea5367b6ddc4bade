"""Unique keys to owner ranks: who is asked for which local row, and where the answer will lie.

Unique keys come part by part, in the order (bucket, owner).  The rows that come back are used in
the same order; on the wire they go in the order (owner, bucket).  That is a permutation of whole
parts, so each key moves by an offset that only depends on its part.

The keys of replicated rows go nowhere: their part has its place among the others, but no message.

Shape suffixes as in ``layout``; N ids, U unique keys.
"""

from collections.abc import Sequence
from functools import cached_property

import torch

from fusedrec_torchrec.core import operators
from fusedrec_torchrec.core.transfer import to_device
from fusedrec_torchrec.exchange.layout import ExchangeLayout

__all__ = ["Route"]


class Route:
    """Where the unique keys of a batch go; no host synchronisation.

    Args:
        layout: where rows live.
        keys_U: the unique keys, part after part; what is behind the last one is padding.
        counts_P: how many each part has.

    Attributes:
        counts_KO: rows asked of each owner in each bucket.
    """

    def __init__(
        self, layout: ExchangeLayout, keys_U: torch.Tensor, counts_P: torch.Tensor
    ) -> None:
        self.counts_KO = counts_P.view(len(layout.buckets), layout.owners)
        self._ranks = layout.world_size
        self._keys_U = keys_U
        self._part_starts_P1 = layout.part_starts_P1
        self._packs = operators.available_on(layout.device, "pack_rows")

    @property
    def counts_KW(self) -> torch.Tensor:
        """Rows asked of each rank in each bucket."""
        return self.counts_KO[:, : self._ranks]

    @cached_property
    def local_rows_U(self) -> torch.Tensor:
        """The row of each unique key in its owner's bucket, int32."""
        starts_U = self._per_key(self._part_starts_P1[:-1], behind=0)
        return (self._keys_U - starts_U).int()

    def places(self, counts_OK: list[list[int]]) -> list[torch.Tensor]:
        """Returns the places of each bucket's replica that are asked for, int32.

        Args:
            counts_OK: ``counts_KO`` on the host, owner by owner; other buckets may follow.
        """
        places, end = [], 0
        own_OK = (counts_K[: len(self.counts_KO)] for counts_K in counts_OK)
        for k, counts_O in enumerate(zip(*own_OK, strict=True)):
            end += sum(counts_O)
            keys = self._keys_U[end - counts_O[-1] : end]
            places.append((keys - self._part_starts_P1[(k + 1) * len(counts_O) - 1]).int())
        return places

    def write(self, words: torch.Tensor, starts_W: Sequence[int]) -> None:
        """Writes the local rows for each rank, from its start on.

        Args:
            words: int32, with a spare element at the end.
            starts_W: for each rank.  If rows of a rank run over those of the next one, the content
                of all words is undefined.
        """
        if self._packs:
            torch.ops.fusedrec.pack_rows(
                self._keys_U, self.counts_KO, self._part_starts_P1, list(starts_W), words
            )
            return
        start_W = to_device(starts_W, words.device)
        starts_KW = start_W + self.counts_KW.cumsum(0) - self.counts_KW
        behind = words.numel() - 1
        words.scatter_(0, self._positions(starts_KW, behind), self.local_rows_U)

    def _positions(self, starts_KW: torch.Tensor, behind: int) -> torch.Tensor:
        """Returns where each unique key goes if the keys of a part go to consecutive positions.

        Args:
            starts_KW: place of the first key of each part.
            behind: place of replicated rows and of everything behind the last unique key; no key
                goes beyond it.
        """
        counts_P = self.counts_KO.reshape(-1)
        replicas = self.counts_KO.size(1) - self._ranks
        starts_KO = torch.nn.functional.pad(starts_KW, (0, replicas), value=behind)
        shifts_P = starts_KO.reshape(-1) - (counts_P.cumsum(0) - counts_P)
        position_U = torch.arange(self._keys_U.numel(), device=counts_P.device)
        return position_U.add_(self._per_key(shifts_P, behind)).clamp_(max=behind)

    def _per_key(self, values_P: torch.Tensor, behind: int) -> torch.Tensor:
        """Returns the value of each key's part; ``behind`` for all behind the last unique key."""
        counts_P, keys = self.counts_KO.reshape(-1), self._keys_U.numel()
        values = torch.cat([values_P, values_P.new_full((1,), behind)])
        counts = torch.cat([counts_P, (keys - counts_P.sum()).view(1)])
        return values.repeat_interleave(counts, output_size=keys)
