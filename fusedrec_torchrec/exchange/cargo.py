"""All that a batch sends to its owners: rows of some tables, bags of others.

    words for an owner = [ int32 local rows, bucket after bucket | those of bags, see bag_routing ]

A *unit* is what an owner answers with one row: a distinct row, or a distinct bag.
"""

from collections.abc import Sequence
from functools import cached_property

import torch

from fusedrec_torchrec.exchange.bag_routing import BagRoute
from fusedrec_torchrec.exchange.routing import Route

__all__ = ["Cargo"]


class Cargo:
    """The words of a batch.

    Args:
        ranks: the owners.
        rows: where distinct rows go; None if no table's rows travel.
        bags: where distinct bags go; None if no table's owner pools.

    Attributes:
        counts_KO: units asked of each owner in each bucket.
        replica_counts_K: replicated rows of each bucket whose rows travel; of no bucket if no rows
            are replicated.
    """

    def __init__(self, ranks: int, rows: Route | None, bags: BagRoute | None) -> None:
        assert rows is not None or bags is not None
        self._ranks = ranks
        self.rows = rows
        self.bags = bags
        if bags is None:
            assert rows is not None
            self.counts_KO = rows.counts_KO
        elif rows is None:
            self.counts_KO = bags.units_KW
        else:
            replicas = rows.counts_KO.size(1) - ranks
            units_KO = torch.nn.functional.pad(bags.units_KW, (0, replicas))
            self.counts_KO = torch.cat([rows.counts_KO, units_KO])
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
        counts_KW = self.counts_KW
        if self.bags is not None:
            counts_KW = torch.cat([counts_KW, self.bags.ids_KW])
        return counts_KW.t()

    @cached_property
    def words_W(self) -> torch.Tensor:
        """How many words there are for each rank."""
        words_W = self._row_words_W
        return words_W if self.bags is None else words_W + self.bags.words_KW().sum(0)

    @property
    def _row_words_W(self) -> torch.Tensor:
        if self.rows is None:
            return self.counts_KO.new_zeros(self._ranks)
        return self.rows.counts_KW.sum(0)

    def write(self, words: torch.Tensor, starts_W: Sequence[int]) -> None:
        """Writes the words for each rank, from its start on; there is a spare one at the end."""
        if self.rows is not None:
            self.rows.write(words, starts_W)
        if self.bags is not None:
            behind = self._row_words_W.tolist()
            self.bags.write(words, [a + b for a, b in zip(starts_W, behind, strict=True)])
