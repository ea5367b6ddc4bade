"""All that a batch sends to its owners: rows of some tables, bags of others.

    words for an owner = [ int32 local rows, bucket after bucket | those of bags, see bag_routing ]

A *unit* is what an owner answers with one row: a distinct row, or a distinct bag.
"""

from collections.abc import Sequence
from functools import cached_property

import torch

from fusedrec_torchrec.exchange.bag_routing import BagRoute
from fusedrec_torchrec.exchange.device_bags import DeviceBagRoute
from fusedrec_torchrec.exchange.routing import Route

__all__ = ["Cargo"]


class Cargo:
    """The words of a batch.

    Args:
        ranks: the owners.
        rows: where distinct rows go; None if no table's rows travel.
        bags: where distinct bags go; None if no table's owner pools.

    Attributes:
        counts_HO: units asked of each owner in each bucket, and below them the ids in each bucket
            with bags.
        counts_KO: the units.
        bag_buckets: how many buckets have bags.
        replica_counts_K: replicated rows of each bucket whose rows travel; of no bucket if no rows
            are replicated.
    """

    def __init__(
        self, ranks: int, rows: Route | None, bags: BagRoute | DeviceBagRoute | None
    ) -> None:
        assert rows is not None or bags is not None
        self._ranks = ranks
        self.rows = rows
        self.bags = bags
        if bags is None:
            assert rows is not None
            self.counts_HO = rows.counts_KO
        elif rows is None:
            self.counts_HO = bags.counts_HW
        else:
            counts_HO, replicas = bags.counts_HW, rows.counts_KO.size(1) - ranks
            if replicas:
                counts_HO = torch.nn.functional.pad(counts_HO, (0, replicas))
            self.counts_HO = torch.cat([rows.counts_KO, counts_HO])
        self.bag_buckets = 0 if bags is None else bags.counts_HW.size(0) // 2
        self.counts_KO = self.counts_HO[: self.counts_HO.size(0) - self.bag_buckets]
        self.replica_counts_K = (
            self.counts_KO.new_empty(0) if rows is None else rows.counts_KO[:, ranks:].flatten()
        )

    @property
    def counts_KW(self) -> torch.Tensor:
        """Units asked of each rank in each bucket."""
        return self.counts_KO[:, : self._ranks]

    @cached_property
    def counts_WH(self) -> torch.Tensor:
        """The counts in the headers for each rank: units by bucket, ids by bucket with bags."""
        return self.counts_HO[:, : self._ranks].t()

    @property
    def words_per_id(self) -> int:
        """How many words an id of a bag takes."""
        return 1 if self.bags is None else self.bags.words_per_id

    @cached_property
    def words_W(self) -> torch.Tensor:
        """How many words there are for each rank."""
        words_W = self.counts_KW.sum(0)
        if self.bags is None:
            return words_W
        ids_W = self.counts_HO[self.counts_KO.size(0) :, : self._ranks].sum(0)
        return words_W + self.words_per_id * ids_W

    def write(self, words: torch.Tensor, starts_W: Sequence[int]) -> None:
        """Writes the words for each rank, from its start on; there is a spare one at the end."""
        if self.rows is not None:
            self.rows.write(words, starts_W)
        if self.bags is not None:
            rows_KO = None if self.rows is None else self.rows.counts_KO
            self.bags.write(words, starts_W, rows_KO)
