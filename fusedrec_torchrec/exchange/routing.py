"""Unique keys to owner ranks: who is asked for which local row, and where the answer will lie.

Unique keys come part by part, in the order (bucket, owner).  The rows that come back are used in
the same order; on the wire they go in the order (owner, bucket).  That is a permutation of whole
parts, so each key moves by an offset that only depends on its part.

The keys of replicated rows go nowhere: their part has its place among the others, but no message.

Shape suffixes as in ``layout``; N ids, U unique keys.
"""

from functools import cached_property

import torch

from fusedrec_torchrec.core import native
from fusedrec_torchrec.exchange.dedup import Unique
from fusedrec_torchrec.exchange.layout import ExchangeLayout

__all__ = ["Route"]


class Route:
    """Where the unique keys of a batch go; no host synchronisation.

    Attributes:
        counts_KO: rows asked of each owner in each bucket.
    """

    def __init__(self, layout: ExchangeLayout, unique: Unique) -> None:
        self.counts_KO = unique.counts_P.view(len(layout.buckets), layout.owners)
        self._ranks = layout.world_size
        self._keys_U = unique.keys_U
        self._part_starts_P1 = layout.part_starts_P1
        self._native = native.available_on(layout.device)

    @property
    def counts_KW(self) -> torch.Tensor:
        """Rows asked of each rank in each bucket."""
        return self.counts_KO[:, : self._ranks]

    @cached_property
    def local_rows_U(self) -> torch.Tensor:
        """The row of each unique key in its owner's bucket, int32."""
        starts_U = self._per_key(self._part_starts_P1[:-1], behind=0)
        return (self._keys_U - starts_U).int()

    def slots(self, counts_OK: list[list[int]]) -> list[torch.Tensor]:
        """The slots of each bucket's replica that are asked for, int32.

        Args:
            counts_OK: ``counts_KO`` on the host, owner by owner.
        """
        slots, end = [], 0
        for k, counts_O in enumerate(zip(*counts_OK, strict=True)):
            end += sum(counts_O)
            keys = self._keys_U[end - counts_O[-1] : end]
            slots.append((keys - self._part_starts_P1[(k + 1) * len(counts_O) - 1]).int())
        return slots

    def pack(self, flat: torch.Tensor, header: int) -> None:
        """Writes the local rows into messages to their owners.

        Args:
            flat: int32, as many messages of one length as there are ranks, and a spare element.
            header: elements at the beginning of a message that stay free.  If an owner's rows do
                not fit behind them, the content of all messages, headers included, is undefined.
        """
        ranks = self._ranks
        width = (flat.numel() - 1) // ranks
        if self._native:
            messages = flat[: ranks * width].view(ranks, width)
            torch.ops.fusedrec.pack(
                self._keys_U, self.counts_KO, self._part_starts_P1, header, messages
            )
            return
        rows_start_W = torch.arange(ranks, device=flat.device) * width + header
        starts_KW = rows_start_W + self.counts_KW.cumsum(0) - self.counts_KW
        flat.scatter_(0, self._positions(starts_KW, behind=ranks * width), self.local_rows_U)

    def wire_order(self) -> torch.Tensor:
        """The local rows, owner after owner."""
        if len(self.counts_KO) == 1:
            return self.local_rows_U  # behind the ranks' rows those of the replica
        counts_WK = self.counts_KW.t().reshape(-1)
        starts_WK = (counts_WK.cumsum(0) - counts_WK).view(self.counts_KW.t().shape)
        keys = self._keys_U.numel()
        ordered = self.local_rows_U.new_empty(keys + 1)
        ordered.scatter_(0, self._positions(starts_WK.t(), behind=keys), self.local_rows_U)
        return ordered[:-1]

    def _positions(self, starts_KW: torch.Tensor, behind: int) -> torch.Tensor:
        """Where each unique key goes if the keys of a part go to consecutive places.

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
        """The value of each key's part; ``behind`` for everything behind the last unique key."""
        counts_P, keys = self.counts_KO.reshape(-1), self._keys_U.numel()
        values = torch.cat([values_P, values_P.new_full((1,), behind)])
        counts = torch.cat([counts_P, (keys - counts_P.sum()).view(1)])
        return values.repeat_interleave(counts, output_size=keys)
