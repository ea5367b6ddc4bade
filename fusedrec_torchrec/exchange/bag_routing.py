"""What is asked of owners that pool bags, and how it is written for them.

    words for an owner = [ lengths | int32 rows | weights ... ], bucket after bucket

Weights are there if the module is weighted, as the bits of float32 numbers.
"""

from collections.abc import Callable, Sequence
from functools import cached_property

import torch

from fusedrec_torchrec.core import native
from fusedrec_torchrec.core.transfer import to_device
from fusedrec_torchrec.exchange.bag_layout import BagLayout
from fusedrec_torchrec.exchange.distinct_bags import DistinctBags

__all__ = ["BagRoute"]


class BagRoute:
    """Where the distinct bags of a batch go.

    Args:
        layout: where tables live.
        distinct: the bags; ``ids_M`` are not looked at.
        rows_M: rows of their tables, for each of ``distinct.ids_M``.

    Attributes:
        units_KW: units asked of each rank in each bucket.
        ids_KW: the ids in them.
    """

    def __init__(self, layout: BagLayout, distinct: DistinctBags, rows_M: torch.Tensor) -> None:
        self._layout = layout
        self._distinct = distinct
        self._rows_M = rows_M
        self._native = native.available_on(layout.device)
        make: Callable[..., tuple[torch.Tensor, ...]] = (
            torch.ops.fusedrec.bag_units if self._native else _bag_units
        )
        (
            self._bag_U,
            self._first_row_U,
            self.units_KW,
            self.ids_KW,
            self._unit_X,
            self._place_G,
        ) = make(
            distinct.lengths_G,
            to_device(distinct.bags_S, layout.device),
            layout.ends_S,
            layout.shards_3X,
            len(layout.buckets),
            layout.world_size,
        )

    @cached_property
    def counts_HW(self) -> torch.Tensor:
        """The units, and below them the ids in them."""
        return torch.cat([self.units_KW, self.ids_KW])

    @property
    def words_per_id(self) -> int:
        """How many words an id takes."""
        return 1 if self._distinct.weights_M is None else 2

    def cells(self, bucket: int, strides: Sequence[int], side_by_side: bool) -> torch.Tensor:
        """Returns the unit of each cell, numbered in its bucket.

        The number of units in the bucket stands for an empty bag.

        Args:
            bucket: number of the bucket.
            strides: bags of each slot of these tables.
            side_by_side: whether cells are in the order (sample, slot, shard), not
                (slot, sample, shard).
        """
        layout = self._layout
        slots = layout.slots_of(layout.buckets[bucket])
        first_bag = sum(strides[: slots.start])
        bags, shards = list(strides[slots]), layout.shards[slots]
        number_B = self._distinct.number_B[first_bag : first_bag + sum(bags)]
        empty = self._units_of_bucket[bucket]
        make = torch.ops.fusedrec.bag_cells if self._native else _bag_cells
        return make(number_B, bags, shards, self._place_G, self._unit_X, empty, side_by_side)

    @cached_property
    def _units_of_bucket(self) -> list[int]:
        units: list[int] = self.units_KW.sum(1).tolist()
        return units

    def write(
        self,
        words: torch.Tensor,
        starts_W: Sequence[int],
        row_counts_KO: torch.Tensor | None = None,
    ) -> None:
        """Writes the words for each rank, from its start on, behind those of rows.

        Args:
            words: int32.
            starts_W: for each rank.
            row_counts_KO: rows asked of each owner in each bucket whose rows travel.
        """
        distinct = self._distinct
        if row_counts_KO is not None:
            rows_O = row_counts_KO.sum(0).tolist()
            starts_W = [start + rows for start, rows in zip(starts_W, rows_O, strict=False)]
        pack = torch.ops.fusedrec.pack_bags if self._native else _pack_bags
        pack(
            self._rows_M,
            distinct.lengths_G,
            distinct.weights_M,
            self._bag_U,
            self._first_row_U,
            self.units_KW,
            self.ids_KW,
            list(starts_W),
            words,
        )


def _bag_units(
    lengths_G: torch.Tensor,
    distinct_S: torch.Tensor,
    ends_S: torch.Tensor,
    shards_3X: torch.Tensor,
    buckets: int,
    ranks: int,
) -> tuple[torch.Tensor, ...]:
    """Does what the C++ operator ``bag_units`` does, by torch's own operators."""
    device = lengths_G.device
    slot_G = torch.arange(distinct_S.numel(), device=device).repeat_interleave(distinct_S)
    shards_S = ends_S.diff(prepend=ends_S.new_zeros(1))
    shards_G = shards_S[slot_G]
    place_G = shards_G.cumsum(0) - shards_G
    bag_X = torch.arange(slot_G.numel(), device=device).repeat_interleave(shards_G)
    column_X = torch.arange(bag_X.numel(), device=device) - place_G[bag_X]
    shard_X = (ends_S - shards_S)[slot_G][bag_X] + column_X
    bucket_X, owner_X, first_row_X = shards_3X[:, shard_X]
    part_X = bucket_X * ranks + owner_X
    order_U = torch.sort(part_X, stable=True).indices
    units_KW = torch.zeros(buckets * ranks, dtype=torch.int64, device=device)
    ids_KW = units_KW.clone()
    units_KW.index_add_(0, part_X, torch.ones_like(part_X))
    ids_KW.index_add_(0, part_X, lengths_G[bag_X].long())
    units_KW, ids_KW = units_KW.view(buckets, ranks), ids_KW.view(buckets, ranks)
    in_bucket_K = units_KW.sum(1)
    bucket_start_K = in_bucket_K.cumsum(0) - in_bucket_K
    unit_X = torch.empty_like(order_U).scatter_(
        0, order_U, torch.arange(order_U.numel(), device=device)
    )
    unit_X -= bucket_start_K[bucket_X]
    bag_U, first_row_U = bag_X[order_U].int(), first_row_X[order_U].int()
    return bag_U, first_row_U, units_KW, ids_KW, unit_X.int(), place_G.int()


def _bag_cells(
    number_B: torch.Tensor,
    bags: Sequence[int],
    shards: Sequence[int],
    place_G: torch.Tensor,
    unit_X: torch.Tensor,
    empty: int,
    side_by_side: bool,
) -> torch.Tensor:
    """Does what the C++ operator ``bag_cells`` does, by torch's own operators."""
    units = torch.cat([unit_X, unit_X.new_full((max(shards, default=1),), empty)])
    places = torch.cat([place_G, place_G.new_full((1,), unit_X.numel())])
    pieces = []
    for numbers, count in zip(number_B.split(list(bags)), shards, strict=True):
        first = places[numbers]  # -1 is the last: behind all units
        columns = torch.arange(count, device=number_B.device)
        pieces.append(units[first[:, None] + columns])
    if side_by_side:
        return torch.cat(pieces, dim=1).reshape(-1)
    return torch.cat([piece.reshape(-1) for piece in pieces])


def _pack_bags(
    rows_M: torch.Tensor,
    lengths_G: torch.Tensor,
    weights_M: torch.Tensor | None,
    bag_U: torch.Tensor,
    first_row_U: torch.Tensor,
    units_KW: torch.Tensor,
    ids_KW: torch.Tensor,
    starts_W: Sequence[int],
    words: torch.Tensor,
) -> None:
    """Does what the C++ operator ``pack_bags`` does, by torch's own operators."""
    device = words.device
    per_id = 1 if weights_M is None else 2
    size_KW = units_KW + per_id * ids_KW
    start_KW = torch.tensor(list(starts_W), device=device) + size_KW.cumsum(0) - size_KW
    units_P, ids_P, start_P = units_KW.flatten(), ids_KW.flatten(), start_KW.flatten()
    part_U = torch.arange(units_P.numel(), device=device).repeat_interleave(units_P)
    lengths_U = lengths_G[bag_U].long()
    unit_Y = torch.arange(part_U.numel(), device=device).repeat_interleave(lengths_U)
    # Units and ids come part after part, so a shift for each part brings them to their places.
    shift_P = start_P - (units_P.cumsum(0) - units_P)
    at_U = torch.arange(part_U.numel(), device=device) + shift_P[part_U]
    words[at_U] = lengths_U.to(words.dtype)
    id_shift_P = start_P + units_P - (ids_P.cumsum(0) - ids_P)
    at_Y = torch.arange(unit_Y.numel(), device=device) + id_shift_P[part_U[unit_Y]]
    start_G = lengths_G.cumsum(0) - lengths_G
    first_Y = (lengths_U.cumsum(0) - lengths_U)[unit_Y]
    in_unit_Y = torch.arange(unit_Y.numel(), device=device) - first_Y
    source_Y = start_G[bag_U].long()[unit_Y] + in_unit_Y
    words[at_Y] = (rows_M[source_Y] + first_row_U[unit_Y]).to(words.dtype)
    if weights_M is not None:
        words[at_Y + ids_P[part_U[unit_Y]]] = weights_M[source_Y].view(torch.int32)
