"""Ids to the distinct rows that they ask for: keys, dedup, and which row is whose.

That is one operator, in C++ or of Triton kernels.  The one in C++ also puts the ids into the order
in which they are pooled; kernels leave them where they are, and need no count of them
(``of_batch``).  Without it, it is done step by step (``keys``, ``dedup``).
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch

from fusedrec_torchrec.core import operators
from fusedrec_torchrec.core.stages import stage
from fusedrec_torchrec.exchange.dedup import Dedup, Occurrences, Unique
from fusedrec_torchrec.exchange.keys import KeySpace
from fusedrec_torchrec.exchange.layout import ExchangeLayout
from fusedrec_torchrec.exchange.options import ExchangeOptions
from fusedrec_torchrec.exchange.replication import ReplicaIndex
from fusedrec_torchrec.exchange.slot_bags import RowIds

__all__ = ["BucketRows", "NumberedRows", "RowNumbers", "SlotTables", "rows_of_buckets"]


@dataclass(frozen=True)
class BucketRows:
    """The ids of a bucket, by the rows that they ask for.

    Attributes:
        rows_N: for each id, the number of its row in the bucket's matrix of received rows, int32.
        occurrences: the ids of each of these rows; None if not known.
        offsets_B1: where bags begin, if ids are in the order (sample, slot) and some bags do not
            have one id; else None.
    """

    rows_N: torch.Tensor
    occurrences: Occurrences | None = None
    offsets_B1: torch.Tensor | None = None


@dataclass(frozen=True)
class NumberedRows:
    """The distinct rows that a batch asks for.

    Attributes:
        keys_U: their keys, part after part, see ``Unique``.
        counts_P: how many each part has, int64.
        buckets: the ids of each bucket.
        in_bag_order: whether ids are in the order (sample, slot), not in that of the batch.
        bad: whether any id is out of its table's range, a 0-dim tensor; rows mean nothing then.
    """

    keys_U: torch.Tensor
    counts_P: torch.Tensor
    buckets: list[BucketRows]
    in_bag_order: bool
    bad: torch.Tensor


class SlotTables(NamedTuple):
    """What the kernels want to know of slots: see ``number_batch_rows`` of ``core/gpu``."""

    rows_S: torch.Tensor
    salts_S2: torch.Tensor | None
    starts_SW: torch.Tensor
    shifts_SW: torch.Tensor


class RowNumbers:
    """Finds the distinct rows of batches.

    Args:
        layout: where rows live.
        options: the user's settings.
    """

    def __init__(self, layout: ExchangeLayout, options: ExchangeOptions) -> None:
        self._layout = layout
        self._keys = KeySpace(layout, options)
        self._dedup = Dedup(layout.part_starts_P1)
        self._slot_ends = [bucket.end_slot for bucket in layout.buckets]
        self._no_lengths = torch.empty(0, dtype=torch.int32, device=layout.device)

    def __call__(
        self,
        ids_N: torch.Tensor,
        counts: list[int],
        index: ReplicaIndex | None = None,
        lengths_B: torch.Tensor | None = None,
    ) -> NumberedRows:
        """Finds the distinct rows of a batch.

        Args:
            ids_N: int32 or int64 ids, grouped by slot.
            counts: the number of ids of each slot.
            index: which rows are replicated.
            lengths_B: ids of each bag, slot after slot, if all slots have as many bags and whoever
                can do it is to put ids in the order (sample, slot).
        """
        layout = self._layout
        can = operators.available_on(layout.device, "number_rows")
        if not can or (index is not None and index.table is None):
            return self._by_sort(ids_N, counts, index)
        with stage("keys"):
            ids_N = self._keys.hashed(ids_N, counts)
        with stage("dedup"):
            keys_U, rows_N, offsets, counts_P, bad = torch.ops.fusedrec.number_rows(
                ids_N.contiguous(),
                self._no_lengths if lengths_B is None else lengths_B.int().contiguous(),
                counts,
                layout.slot_rows_S,
                layout.slot_starts_SW,
                layout.slot_shifts_SW,
                layout.part_starts_P1,
                None if index is None else index.table,
                self._slot_ends,
                0 if lengths_B is None else lengths_B.numel() // len(counts),
            )
        buckets = [
            BucketRows(rows, offsets_B1=offsets[k] if offsets and offsets[k].numel() else None)
            for k, rows in enumerate(rows_N.split(self.per_bucket(counts)))
        ]
        return NumberedRows(keys_U, counts_P, buckets, bool(offsets), bad)

    def slots(self, order_S: torch.Tensor) -> SlotTables:
        """Returns what the kernels want to know of slots, in an order."""
        layout, salts_S2 = self._layout, self._keys.salts_S2
        return SlotTables(
            layout.slot_rows_S[order_S],
            None if salts_S2 is None else salts_S2[order_S],
            layout.slot_starts_SW[order_S],
            layout.slot_shifts_SW[order_S],
        )

    def of_batch(
        self,
        ids_N: torch.Tensor,
        offsets_B1: torch.Tensor,
        batch: int,
        slots: SlotTables,
        index: ReplicaIndex | None,
    ) -> tuple[NumberedRows, torch.Tensor, RowIds]:
        """Finds the distinct rows of a batch on CUDA, with no count of its ids on the host.

        Args:
            ids_N: ids of a batch, slot after slot, maybe with those of other slots behind them.
            offsets_B1: where bags begin.
            batch: bags of each slot.
            slots: the slots, in the order of the batch.
            index: which rows are replicated.

        Returns:
            the rows, not by bucket; the row of each id among those of all buckets; and which ids
            a row has.
        """
        with stage("dedup"):
            keys_U, rows_N, counts_P, bad, *row_ids = torch.ops.fusedrec.number_batch_rows(
                ids_N.contiguous(),
                offsets_B1.contiguous(),
                batch,
                *slots,
                self._layout.part_starts_P1,
                None if index is None else index.table,
            )
        return NumberedRows(keys_U, counts_P, [], False, bad), rows_N, RowIds(*row_ids)

    def _by_sort(
        self, ids_N: torch.Tensor, counts: list[int], index: ReplicaIndex | None
    ) -> NumberedRows:
        """Does it step by step; ids stay in the order of the batch."""
        with stage("keys"):
            keys_N, bad = self._keys.keys(ids_N, counts)
        with stage("dedup"):
            unique = self._dedup(keys_N, index)
        per_bucket = self.per_bucket(counts)
        buckets = list(rows_of_buckets(unique, len(self._layout.buckets), per_bucket))
        return NumberedRows(unique.keys_U, unique.counts_P, buckets, False, bad)

    def per_bucket(self, ids_per_slot: list[int]) -> list[int]:
        """Returns how many ids each bucket has."""
        return [sum(ids_per_slot[b.first_slot : b.end_slot]) for b in self._layout.buckets]

    def describe_bad_ids(self, ids_N: torch.Tensor, counts: list[int]) -> str | None:
        """Returns the error message for the first out-of-range id; for the error path only."""
        return self._keys.describe_bad_ids(ids_N, counts)


def rows_of_buckets(
    unique: Unique, buckets: int, ids_per_bucket: list[int]
) -> Iterator[BucketRows]:
    """Yields for the ids of each bucket their rows in its matrix, and the ids of each of these."""
    if buckets == 1:
        yield BucketRows(unique.inverse_N, unique.occurrences)
        return
    counts_K = unique.counts_P.view(buckets, -1).sum(1)
    first_row_K = counts_K.cumsum(0) - counts_K
    first_id = 0
    for ids, first_row in zip(ids_per_bucket, first_row_K, strict=True):
        own = slice(first_id, first_id + ids)
        occurrences = unique.occurrences
        if occurrences is not None:
            # Of static shape: there are at most as many rows as ids.
            rows = first_row + torch.arange(ids + 1, device=first_row.device)
            starts_U1 = occurrences.starts_U1.index_select(
                0, rows.clamp_(max=occurrences.starts_U1.numel() - 1)
            )
            occurrences = Occurrences(occurrences.order_N[own] - first_id, starts_U1 - first_id)
        yield BucketRows(unique.inverse_N[own] - first_row.int(), occurrences)
        first_id += ids
