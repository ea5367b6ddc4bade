"""Bags that owners pool, by kernels that leave all counts on the device.

What ``distinct_bags`` and ``bag_routing`` do step by step is one operator here, ``ask_bags``, whose
outputs are as long as they can get; sizes of a batch that the host knows anyway, bags of slots and
shards of tables, are all it takes, with the offsets of the bags.  Ids are rows of their tables
before equal bags are looked for, not afterwards: two ids that are hashed to one row are the same.

Shape suffixes: S slots, X shards of the slots' tables, B bags, N ids, C cells, K buckets, W ranks,
P = K * W parts.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from fusedrec_torchrec.core import operators
from fusedrec_torchrec.core.transfer import to_device
from fusedrec_torchrec.exchange.bag_layout import BagLayout
from fusedrec_torchrec.exchange.slot_ids import SlotIds

__all__ = ["DeviceBagRoute", "DeviceBags"]


@dataclass(frozen=True)
class _Cells:
    """Where the cells of a batch lie.

    Attributes:
        places: numbers for the kernels; see ``ask_bags``.
        per_bucket: how many cells each bucket has.
    """

    places: list[int]
    per_bucket: list[int]

    @classmethod
    def of(cls, layout: BagLayout, strides: Sequence[int], side_by_side: bool) -> "_Cells":
        """Returns them for a number of bags of each slot.

        Args:
            layout: where tables live.
            strides: bags of each slot.
            side_by_side: whether cells are in the order (sample, slot, shard), not
                (slot, sample, shard).
        """
        bags_X = [bags for bags, n in zip(strides, layout.shards, strict=True) for _ in range(n)]
        parts = len(layout.buckets) * layout.world_size
        cells_P, runs_X, at = [0] * parts, [0] * len(bags_X), 0
        for x in sorted(range(len(bags_X)), key=layout.parts.__getitem__):
            runs_X[x] = at
            at += bags_X[x]
            cells_P[layout.parts[x]] += bags_X[x]
        first, firsts_X, steps_X, per_bucket = 0, list[int](), list[int](), list[int]()
        for bucket in layout.buckets:
            own, cell = layout.slots_of(bucket), first
            width = sum(layout.shards[own])
            for bags, shards in zip(strides[own], layout.shards[own], strict=True):
                firsts_X += range(cell, cell + shards)
                steps_X += [width if side_by_side else shards] * shards
                cell += shards if side_by_side else shards * bags
            cells = sum(b * n for b, n in zip(strides[own], layout.shards[own], strict=True))
            per_bucket.append(cells)
            first += cells
        bag_ends, part_cells = accumulate(strides), accumulate(cells_P, initial=0)
        return cls([*bag_ends, *runs_X, *firsts_X, *steps_X, *part_cells], per_bucket)


class DeviceBags:
    """Finds out what batches ask of owners that pool.

    Args:
        layout: where their tables live.
        means: whether each slot is mean-pooled.
        ids: of the slots.
        weighted: whether the weights of a batch count.
    """

    def __init__(
        self, layout: BagLayout, means: Sequence[bool], ids: SlotIds, weighted: bool
    ) -> None:
        self.layout = layout
        self.rows_S, self.salts_S2 = ids.rows_S, ids.salts_S2
        self.weighted = weighted
        device = layout.device
        self.tables_S = torch.tensor(layout.table_numbers, dtype=torch.int64, device=device)
        self.means_S = None
        if any(means):
            self.means_S = torch.tensor(means, dtype=torch.uint8, device=device)
        self.means = list(means)
        self._known: tuple[tuple[Sequence[int], bool], _Cells] | None = None

    @property
    def available(self) -> bool:
        """Whether there are kernels for it, now."""
        device = self.layout.device
        return device.type == "cuda" and operators.available_on(device, "ask_bags", "pack_units")

    def cells(self, strides: Sequence[int], side_by_side: bool) -> _Cells:
        """Returns where the cells of a batch lie; mostly as those of the batch before."""
        key = (list(strides), side_by_side)
        if self._known is None or self._known[0] != key:
            self._known = (key, _Cells.of(self.layout, *key))
        return self._known[1]

    def __call__(
        self, features: KeyedJaggedTensor, refused: torch.Tensor | None = None
    ) -> "DeviceBagRoute":
        """Takes a batch in canonical form; no count of its ids is needed on the host."""
        return DeviceBagRoute(self, features, refused)


class DeviceBagRoute:
    """Where the distinct bags of a batch go: what ``BagRoute`` is without kernels.

    Args:
        of: what batches have in common.
        features: the batch.
        refused: whether its lengths are known to be wrong; None if nobody knows.

    Attributes:
        counts_HW: units asked of each rank in each bucket, and below them the ids in them.
        words_per_id: how many words an id takes.
        bad: whether any id is out of range, a 0-dim tensor.
    """

    def __init__(
        self, of: DeviceBags, features: KeyedJaggedTensor, refused: torch.Tensor | None
    ) -> None:
        layout = of.layout
        self._refused = refused
        self._layout, self._means = layout, of.means
        weights_N = features.weights_or_none() if of.weighted else None
        self._weights_N = None if weights_N is None else weights_N.detach().float().contiguous()
        self.words_per_id = 1 if weights_N is None else 2
        strides = features.stride_per_key()
        first, end = layout.first_slot, layout.first_slot + len(layout.slot_names)
        places = of.cells(strides[first:end], not features.variable_stride_per_key())
        self._per_bucket = places.per_bucket
        self._places = to_device(places.places, layout.device)
        first_bag, end_bag = sum(strides[:first]), sum(strides[:end])
        self._starts_B1 = features.offsets().int()[first_bag : end_bag + 1].contiguous()
        self._rows_N = features.values().contiguous()
        if of.salts_S2 is not None:
            bag_ends_S = self._places[: len(layout.slot_names)]
            ends_S = self._starts_B1.index_select(0, bag_ends_S)
            self._rows_N = torch.ops.fusedrec.hash_slots(
                self._rows_N, ends_S, of.rows_S, of.salts_S2
            )
        (
            self.counts_HW,
            self._cells_C,
            self._divisor_C,
            self._sums_C1,
            self.bad,
        ) = torch.ops.fusedrec.ask_bags(
            self._rows_N,
            self._starts_B1,
            self._weights_N,
            self._places,
            sum(places.per_bucket),
            of.tables_S,
            of.rows_S,
            of.means_S,
            layout.ends_S,
            layout.shards_3X,
            len(layout.buckets),
            layout.world_size,
            refused,
        )

    def cells(self) -> list[tuple[torch.Tensor, torch.Tensor | None]]:
        """Returns for each bucket the unit of each cell, and what it is divided by.

        The number of units in the bucket stands for an empty bag.
        """
        cells: Sequence[torch.Tensor] = self._cells_C.split(self._per_bucket)
        if not self._divisor_C.numel():
            return [(cells_C, None) for cells_C in cells]
        divisors: Sequence[torch.Tensor] = self._divisor_C.split(self._per_bucket)
        slots = [self._layout.slots_of(bucket) for bucket in self._layout.buckets]
        return [
            (cells_C, divisor_C if any(self._means[own]) else None)
            for cells_C, divisor_C, own in zip(cells, divisors, slots, strict=True)
        ]

    def write(
        self, words: torch.Tensor, starts_W: Sequence[int], row_counts_KO: torch.Tensor | None
    ) -> None:
        """Writes the words for each rank, from its start on, behind those of rows.

        Args:
            words: int32.  If there is not enough room, the content of all words is undefined.
            starts_W: for each rank.
            row_counts_KO: rows asked of each owner in each bucket whose rows travel.
        """
        torch.ops.fusedrec.pack_units(
            self._rows_N,
            self._weights_N,
            self._places,
            self._layout.ends_S,
            self._layout.shards_3X,
            self._starts_B1,
            self._sums_C1,
            self.counts_HW,
            row_counts_KO,
            list(starts_W),
            words,
            self._refused,
        )
