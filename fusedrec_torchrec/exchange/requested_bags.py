"""Bags that owners are asked to pool: from a batch to what is sent, and to the output."""

from collections.abc import Callable, Sequence
from functools import cached_property, partial

import torch
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from fusedrec_torchrec.core.stages import stage
from fusedrec_torchrec.exchange.bag_layout import BagLayout
from fusedrec_torchrec.exchange.bag_routing import BagRoute
from fusedrec_torchrec.exchange.bags import Bags, copied_bags
from fusedrec_torchrec.exchange.buckets import Bucket
from fusedrec_torchrec.exchange.device_bags import DeviceBagRoute, DeviceBags
from fusedrec_torchrec.exchange.distinct_bags import BagDedup
from fusedrec_torchrec.exchange.options import ExchangeOptions
from fusedrec_torchrec.exchange.slot_features import SlotFeatures
from fusedrec_torchrec.exchange.slot_ids import SlotIds

__all__ = ["BagRequests", "RequestedBags"]

WORTH = 1 / 16  # of bags must repeat for it to pay to look for equal ones

Cells = tuple[torch.Tensor, torch.Tensor | None]
"""The unit of each cell of a bucket, and what it is divided by, if it is."""


class BagRequests:
    """Finds out what batches ask of owners that pool.

    Args:
        layout: where their tables live.
        options: the user's settings.
        means: whether each slot is mean-pooled.
        weighted: whether the weights of a batch count.
    """

    def __init__(
        self,
        layout: BagLayout,
        options: ExchangeOptions,
        means: Sequence[bool],
        weighted: bool,
    ) -> None:
        self._layout = layout
        self._weighted = weighted
        self._means = list(means)
        self._ids = SlotIds(layout.slot_names, layout.rows, options, layout.device)
        self._dedup = BagDedup(layout.table_numbers, WORTH, layout.device)
        self._on_device = DeviceBags(layout, means, self._ids, weighted)

    def __call__(
        self, features: KeyedJaggedTensor, refused: torch.Tensor | None = None
    ) -> "RequestedBags":
        """Takes a batch in canonical form.

        Args:
            features: the batch.
            refused: whether its lengths are known to be wrong; None if nobody knows.
        """
        layout = self._layout
        first, end = layout.first_slot, layout.first_slot + len(layout.slot_names)
        find_slots = partial(SlotFeatures.of, features, first, end, self._weighted)
        if self._on_device.available:
            with stage("dedup"):
                asked = self._on_device(features, refused)
            side_by_side = not features.variable_stride_per_key()
            return RequestedBags(
                layout, find_slots, asked.cells, side_by_side, self._ids, asked, asked.bad
            )
        slots = find_slots()
        with stage("dedup"):
            distinct = self._dedup(
                slots.ids_N,
                slots.lengths_B,
                slots.weights_N,
                slots.strides,
                [True] * len(slots.strides),
            )
        with stage("keys"):
            rows_M, bad = self._ids.rows(distinct.ids_M, distinct.ids_S)
        with stage("route"):
            route = BagRoute(layout, distinct, rows_M)
        return RequestedBags(
            layout,
            lambda: slots,
            lambda: self._cells(slots, route),
            slots.side_by_side,
            self._ids,
            route,
            bad,
        )

    def _cells(self, slots: SlotFeatures, route: BagRoute) -> list[Cells]:
        return [
            (route.cells(k, slots.strides, slots.side_by_side), self._divisor(slots, bucket))
            for k, bucket in enumerate(self._layout.buckets)
        ]

    def _divisor(self, slots: SlotFeatures, bucket: Bucket) -> torch.Tensor | None:
        """Returns what each cell is divided by, in the order of the cells; None if nothing is."""
        own = self._layout.slots_of(bucket)
        means, shards = self._means[own], self._layout.shards[own]
        if not any(means):
            return None
        first = sum(slots.strides[: own.start])
        lengths = slots.lengths_B[first : first + sum(slots.strides[own])]
        pieces = [
            (piece.clamp(min=1).float() if mean else torch.ones_like(piece, dtype=torch.float32))
            .view(-1, 1)
            .expand(-1, count)
            for piece, mean, count in zip(
                lengths.split(slots.strides[own]), means, shards, strict=True
            )
        ]
        if slots.side_by_side:
            return torch.cat(pieces, dim=1).reshape(-1)
        return torch.cat([piece.reshape(-1) for piece in pieces])


class RequestedBags:
    """What a batch asks of owners that pool.

    Attributes:
        route: where bags go.
        bad: whether any id is out of range, a 0-dim tensor.
    """

    def __init__(
        self,
        layout: BagLayout,
        find_slots: Callable[[], SlotFeatures],
        find_cells: Callable[[], list[Cells]],
        side_by_side: bool,
        ids: SlotIds,
        route: BagRoute | DeviceBagRoute,
        bad: torch.Tensor,
    ) -> None:
        self._layout = layout
        self._find_slots = find_slots
        self._find_cells = find_cells
        self._side_by_side = side_by_side
        self._ids = ids
        self.route = route
        self.bad = bad

    @cached_property
    def _slots(self) -> SlotFeatures:
        """The bags; on CUDA, who asks for them may wait for the device."""
        return self._find_slots()

    def describe_bad(self) -> str:
        """Returns what is wrong with the ids, for the error path only."""
        message = self._ids.describe_bad(self._slots.ids_N, self._slots.ids_per_slot)
        assert message is not None
        return message

    def bags(self) -> list[Bags]:
        """Returns for each bucket which answers form which output."""
        bags = []
        for (cells, divisor), bucket in zip(self._find_cells(), self._layout.buckets, strict=True):
            width = 0
            if self._side_by_side:
                width = sum(self._layout.shards[self._layout.slots_of(bucket)])
            bags.append(copied_bags(cells, divisor, width))
        return bags
