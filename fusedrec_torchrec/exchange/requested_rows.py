"""Rows that are asked of their owners: from a batch to what is sent, and to the output.

Ids become keys, keys become distinct.  On CUDA the kernels do it without a count of ids on the
host, so that nothing waits (``slot_bags``).  Where bags repeat, each distinct bag is pooled once
and then copied to all places in the output that show it.  Only the C++ operator looks for them:
without it, it takes sorts, and on CUDA waits for the device, to save less than that.
"""

from collections.abc import Sequence

import torch
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from fusedrec_torchrec.core import native
from fusedrec_torchrec.core.kept import Kept
from fusedrec_torchrec.core.stages import stage
from fusedrec_torchrec.exchange.bags import (
    Bags,
    distinct_bags,
    ordered_bags,
    pooled_bags,
    sequence_bags,
)
from fusedrec_torchrec.exchange.distinct_bags import BagDedup, DistinctBags
from fusedrec_torchrec.exchange.id_counts import IdCounts, slot_starts
from fusedrec_torchrec.exchange.layout import ExchangeLayout
from fusedrec_torchrec.exchange.options import ExchangeOptions
from fusedrec_torchrec.exchange.replication import Replications
from fusedrec_torchrec.exchange.routing import Route
from fusedrec_torchrec.exchange.row_numbers import NumberedRows, RowNumbers, SlotTables
from fusedrec_torchrec.exchange.slot_bags import SlotBags, SlotColumns, are_counted_on_device
from fusedrec_torchrec.exchange.slot_features import SlotFeatures
from fusedrec_torchrec.exchange.slot_sequences import SlotSequences

__all__ = ["RequestedRows", "RowRequests"]

WORTH = 1 / 4  # of bags must repeat for a slot to look on for equal ones
SAVED = 1.0  # rows that need not be read for every bag, for it to pay to pool distinct ones first
LONG = SAVED / WORTH  # ids that bags have on average, so that so many repeats save enough


class RowRequests:
    """Finds out which rows batches ask for.

    Args:
        layout: where rows live.
        options: the user's settings.
        mean_S: whether each slot is mean-pooled; None for sequences, which do not pool.
        weighted: whether the weights of a batch count.
        learned_weights: whether weights come from feature processors, later on.
        replication: rows that live on several ranks.
    """

    def __init__(
        self,
        layout: ExchangeLayout,
        options: ExchangeOptions,
        mean_S: torch.Tensor | None,
        weighted: bool,
        learned_weights: bool,
        replication: Replications,
    ) -> None:
        self._layout = layout
        self._numbers = RowNumbers(layout, options)
        self.weighted = weighted
        self._replication = replication
        self._learned_weights = learned_weights
        self._folds = (
            mean_S is not None and not learned_weights and native.available_on(layout.device)
        )
        numbers = [t for t, table in enumerate(layout.tables) for _ in table.features]
        self._bag_dedup = BagDedup(numbers, WORTH, layout.device)
        self._pooled = mean_S is not None
        # By the names of a batch: its slots in their order.
        self._orders = Kept[tuple[SlotTables, SlotColumns]](
            lambda slots: (*slots[0], slots[1].slots_S3)
        )
        means = [False] * len(layout.slot_names) if mean_S is None else mean_S.tolist()
        self._columns = SlotColumns.of(layout.buckets, means, layout.device)
        self._mean_per_bucket = [
            mean_S[b.first_slot : b.end_slot].to(layout.device)
            if mean_S is not None and bool(mean_S[b.first_slot : b.end_slot].any())
            else None
            for b in layout.buckets
        ]

    def __call__(self, features: KeyedJaggedTensor) -> "RequestedRows":
        layout, index = self._layout, self._replication.index
        finds_replicas = index is None or index.table is not None
        if finds_replicas and are_counted_on_device(features):
            return self._on_device(features)
        slots = SlotFeatures.of(features, 0, len(layout.slot_names), self.weighted)
        looks, distinct = self._looks(slots), None
        ids_N, ids_per_slot = slots.ids_N, slots.ids_per_slot
        if any(looks):
            with stage("dedup"):
                batch = (ids_N, slots.lengths_B, slots.weights_N, slots.strides)
                looks = self._bag_dedup.repeating(*batch, looks)
                distinct = self._distinct(slots, looks) if any(looks) else None
        if distinct is not None:
            ids_N, ids_per_slot = distinct.ids_M, distinct.ids_S
        lengths_B = slots.lengths_B if distinct is None and self._can_move(slots) else None
        numbered = self._numbers(ids_N, ids_per_slot, index, lengths_B)
        with stage("route"):
            route = Route(layout, numbered.keys_U, numbered.counts_P)
        return RequestedRows(self, features, slots, looks, distinct, numbered, route)

    def _on_device(self, features: KeyedJaggedTensor) -> "RequestedRows":
        """Has the device find out which rows are asked for, with no count of ids on the host."""
        # Triton 3.7 cannot compile all kernels for 64-bit offsets; there are fewer ids than 2^31.
        offsets_B1, strides = features.offsets().int(), features.stride_per_key()
        slots, columns = self._slots_of(tuple(features.keys()))
        variable, count = features.variable_stride_per_key(), len(self._columns.slots)
        starts_S1 = None
        if variable or not self._pooled or self._learned_weights:
            starts_S1 = slot_starts(features, count).int()
        # Kernels go by the ends of slots, every so many offsets.
        ends, apart = offsets_B1, strides[0]
        if variable and starts_S1 is not None:
            ends, apart = starts_S1, 1
        numbered, rows_N, row_ids = self._numbers.of_batch(
            features.values(), ends, apart, slots, self._replication.index
        )
        with stage("route"):
            route = Route(self._layout, numbered.keys_U, numbered.counts_P)
        counts = None
        if not self._pooled or self._learned_weights:
            assert starts_S1 is not None
            counts = IdCounts(starts_S1)
        pooled: SlotBags | SlotSequences
        if self._pooled:
            if variable:
                columns = columns.of_variable_batch(strides[:count])
            pooled = SlotBags(
                columns, rows_N, offsets_B1, row_ids, max(strides[:count]), not variable
            )
        else:
            pooled = SlotSequences(rows_N)
        return RequestedRows(self, features, None, [], None, numbered, route, pooled, counts)

    def _slots_of(self, keys: tuple[str, ...]) -> tuple[SlotTables, SlotColumns]:
        """Returns the slots of a batch in the order of its features."""

        def make() -> tuple[SlotTables, SlotColumns]:
            order = self._order(keys)
            order_S = torch.tensor(order, device=self._layout.device)
            return self._numbers.slots(order_S), self._columns.in_order(order)

        return self._orders.get(keys, make)

    def _order(self, keys: Sequence[str]) -> list[int]:
        """Returns which slot each feature of a batch is of; those of other layouts are behind."""
        names = [feature for feature, _ in self._layout.slot_names]
        own = list(keys[: len(names)])
        return list(range(len(names))) if own == names else [names.index(key) for key in own]

    def _distinct(self, slots: SlotFeatures, looks: list[bool]) -> DistinctBags | None:
        """Returns the distinct bags; None if they had better be pooled as if all were distinct."""
        distinct = self._bag_dedup(
            slots.ids_N, slots.lengths_B, slots.weights_N, slots.strides, looks
        )
        saved = sum(slots.ids_per_slot) - sum(distinct.ids_S)
        return distinct if saved >= SAVED * distinct.full and saved else None

    def _can_move(self, slots: SlotFeatures) -> bool:
        """Returns whether ids can be in the order in which they are pooled, without weights."""
        has_weights = slots.weights_N is not None or self._learned_weights
        can = self._layout.device.type == "cpu" and self._pooled
        return can and slots.side_by_side and not has_weights

    def _looks(self, slots: SlotFeatures) -> list[bool]:
        """Returns which slots look for equal bags."""
        learned = slots.weights_N is not None and slots.weights_N.requires_grad
        if not self._folds or learned:
            return [False] * len(slots.strides)
        return [
            ids >= LONG * bags > 0
            for ids, bags in zip(slots.ids_per_slot, slots.strides, strict=True)
        ]

    def describe_bad(self, features: KeyedJaggedTensor) -> str:
        """Returns what is wrong with the ids, for the error path only."""
        names = [feature for feature, _ in self._layout.slot_names]
        if sorted(features.keys()) == sorted(names) and features.keys() != names:
            features = features.permute([features.keys().index(name) for name in names])
        slots = SlotFeatures.of(features, 0, len(names), self.weighted)
        message = self._numbers.describe_bad_ids(slots.ids_N, slots.ids_per_slot)
        assert message is not None
        return message

    def bags(self, requested: "RequestedRows") -> list[Bags]:
        """Returns for each bucket which rows form which output."""
        bags = []
        for bucket, rows, mean_S in zip(
            self._layout.buckets, requested.numbered.buckets, self._mean_per_bucket, strict=True
        ):
            own = slice(bucket.first_slot, bucket.end_slot)
            if not self._pooled:
                bags.append(sequence_bags(rows))
            elif requested.distinct is not None and any(requested.looks[own]):
                assert requested.slots is not None
                bags.append(distinct_bags(requested.slots, requested.distinct, own, rows, mean_S))
            elif requested.numbered.in_bag_order:
                bags.append(ordered_bags(rows, own.stop - own.start, mean_S))
            else:
                bags.append(pooled_bags(requested.features, bucket, rows, mean_S))
        return bags

    def ids_per_bucket(self, ids_per_slot: list[int]) -> list[int]:
        """Returns how many ids each bucket has."""
        return self._numbers.per_bucket(ids_per_slot)


class RequestedRows:
    """The rows that a batch asks for.

    Attributes:
        numbered: the rows.
        route: where their keys go.
        slot_bags: which rows form which output, if that is for the device to know; else None.
        counts: of the ids of each slot, if they are still on their way to the host; else None.
        bad: whether any id is out of range, a 0-dim tensor.
        ids_per_bucket: how many ids are pooled in each bucket.
        weights_N: their weights; None if there are none.
    """

    def __init__(
        self,
        requests: RowRequests,
        features: KeyedJaggedTensor,
        slots: SlotFeatures | None,
        looks: list[bool],
        distinct: DistinctBags | None,
        numbered: NumberedRows,
        route: Route,
        slot_bags: SlotBags | SlotSequences | None = None,
        counts: IdCounts | None = None,
    ) -> None:
        self._requests = requests
        self.features = features
        self.slots = slots
        self.looks = looks
        self.distinct = distinct
        self.numbered = numbered
        self.route = route
        self.slot_bags = slot_bags
        self.counts = counts
        self.bad = numbered.bad
        self.ids_per_bucket: list[int] = []
        self.weights_N = features.weights_or_none() if requests.weighted else None
        if slots is not None:
            self.ids_per_bucket = requests.ids_per_bucket(
                slots.ids_per_slot if distinct is None else distinct.ids_S
            )
            self.weights_N = slots.weights_N if distinct is None else distinct.weights_M

    def describe_bad(self) -> str:
        """Returns what is wrong with the ids, for the error path only."""
        return self._requests.describe_bad(self.features)

    def bags(self) -> list[Bags]:
        """Returns for each bucket which rows form which output; none if ``slot_bags`` tells."""
        return [] if self.slot_bags is not None else self._requests.bags(self)
