"""Rows that are asked of their owners: from a batch to what is sent, and to the output.

Ids become keys, keys become distinct.  Where bags repeat, each distinct bag is pooled once and then
copied to all places in the output that show it.
"""

from collections.abc import Iterator

import torch
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from fusedrec_torchrec.core.stages import stage
from fusedrec_torchrec.exchange.bags import Bags, distinct_bags, pooled_bags, sequence_bags
from fusedrec_torchrec.exchange.dedup import Dedup, Occurrences, Unique
from fusedrec_torchrec.exchange.distinct_bags import BagDedup, DistinctBags
from fusedrec_torchrec.exchange.keys import KeySpace
from fusedrec_torchrec.exchange.layout import ExchangeLayout
from fusedrec_torchrec.exchange.options import ExchangeOptions
from fusedrec_torchrec.exchange.replication import Replications
from fusedrec_torchrec.exchange.routing import Route
from fusedrec_torchrec.exchange.slot_features import SlotFeatures

__all__ = ["RequestedRows", "RowRequests"]

WORTH = 1 / 4  # of bags must repeat for it to pay to pool each distinct one by itself
LONG = 2  # ids that bags have on average; equal bags of one id each are found as equal ids


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
        self._keys = KeySpace(layout, options)
        self._dedup = Dedup(layout.part_starts_P1)
        self._weighted = weighted
        self._replication = replication
        self._folds = mean_S is not None and not learned_weights
        numbers = [t for t, table in enumerate(layout.tables) for _ in table.features]
        self._bag_dedup = BagDedup(numbers, WORTH, layout.device)
        self._pooled = mean_S is not None
        self._mean_per_bucket = [
            mean_S[b.first_slot : b.end_slot].to(layout.device)
            if mean_S is not None and bool(mean_S[b.first_slot : b.end_slot].any())
            else None
            for b in layout.buckets
        ]

    def __call__(self, features: KeyedJaggedTensor) -> "RequestedRows":
        layout = self._layout
        slots = SlotFeatures.of(features, 0, len(layout.slot_names), self._weighted)
        looks = self._looks(slots)
        distinct = None
        ids_N, ids_per_slot = slots.ids_N, slots.ids_per_slot
        if any(looks):
            with stage("dedup"):
                distinct = self._bag_dedup(
                    slots.ids_N, slots.lengths_B, slots.weights_N, slots.strides, looks
                )
            ids_N, ids_per_slot = distinct.ids_M, distinct.ids_S
        elif self._folds:
            self._bag_dedup.skip()
        with stage("keys"):
            keys_N, bad = self._keys.keys(ids_N, ids_per_slot)
        with stage("dedup"):
            unique = self._dedup(keys_N, self._replication.index)
        with stage("route"):
            route = Route(layout, unique)
        return RequestedRows(self, features, slots, looks, distinct, unique, route, bad)

    def _looks(self, slots: SlotFeatures) -> list[bool]:
        """Returns which slots look for equal bags."""
        learned = slots.weights_N is not None and slots.weights_N.requires_grad
        if not self._folds or learned:
            return [False] * len(slots.strides)
        return [
            looks and ids >= LONG * bags > 0
            for looks, ids, bags in zip(
                self._bag_dedup.looks(), slots.ids_per_slot, slots.strides, strict=True
            )
        ]

    def describe_bad(self, slots: SlotFeatures) -> str:
        """Returns what is wrong with the ids, for the error path only."""
        message = self._keys.describe_bad_ids(slots.ids_N, slots.ids_per_slot)
        assert message is not None
        return message

    def bags(self, requested: "RequestedRows") -> list[Bags]:
        """Returns for each bucket which rows form which output."""
        of_buckets = rows_of_buckets(
            requested.unique, requested.route.counts_KO, requested.ids_per_bucket
        )
        bags = []
        for bucket, (row_N, occurrences), mean_S in zip(
            self._layout.buckets, of_buckets, self._mean_per_bucket, strict=True
        ):
            own = slice(bucket.first_slot, bucket.end_slot)
            if not self._pooled:
                bags.append(sequence_bags(row_N, occurrences))
            elif requested.distinct is not None and any(requested.looks[own]):
                slots, distinct = requested.slots, requested.distinct
                bags.append(distinct_bags(slots, distinct, own, row_N, mean_S, occurrences))
            else:
                bags.append(pooled_bags(requested.features, bucket, row_N, mean_S, occurrences))
        return bags

    def ids_per_bucket(self, ids_per_slot: list[int]) -> list[int]:
        """Returns how many ids each bucket has."""
        return [sum(ids_per_slot[b.first_slot : b.end_slot]) for b in self._layout.buckets]


class RequestedRows:
    """The rows that a batch asks for.

    Attributes:
        route: where their keys go.
        bad: whether any id is out of range, a 0-dim tensor.
        ids_per_bucket: how many ids are pooled in each bucket.
        weights_N: their weights; None if there are none.
    """

    def __init__(
        self,
        requests: RowRequests,
        features: KeyedJaggedTensor,
        slots: SlotFeatures,
        looks: list[bool],
        distinct: DistinctBags | None,
        unique: Unique,
        route: Route,
        bad: torch.Tensor,
    ) -> None:
        self._requests = requests
        self.features = features
        self.slots = slots
        self.looks = looks
        self.distinct = distinct
        self.unique = unique
        self.route = route
        self.bad = bad
        self.ids_per_bucket = requests.ids_per_bucket(
            slots.ids_per_slot if distinct is None else distinct.ids_S
        )
        self.weights_N = slots.weights_N if distinct is None else distinct.weights_M

    def describe_bad(self) -> str:
        """Returns what is wrong with the ids, for the error path only."""
        return self._requests.describe_bad(self.slots)

    def bags(self) -> list[Bags]:
        """Returns for each bucket which rows form which output."""
        return self._requests.bags(self)


def rows_of_buckets(
    unique: Unique, counts_KO: torch.Tensor, ids_per_bucket: list[int]
) -> Iterator[tuple[torch.Tensor, Occurrences | None]]:
    """Yields for the ids of each bucket their rows in its matrix, and the ids of each of these."""
    if len(ids_per_bucket) == 1:
        yield unique.inverse_N, unique.occurrences
        return
    counts_K = counts_KO.sum(1)
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
        yield unique.inverse_N[own] - first_row.int(), occurrences
        first_id += ids
