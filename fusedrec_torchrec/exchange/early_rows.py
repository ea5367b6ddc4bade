"""The rows of one batch that travel before it is its turn, and how the others join them.

Owner and requester know the same mask: a bool for each unit of the batch, in the order in which
units travel, (rank, bucket).  Units that are set have travelled early, the others travel late, when
rows of the batch do anyway.  Both messages keep the order of the units, and the requester puts them
together as if all had come in one.

Buckets may differ in columns.  What moves is a *grain*: as many columns as divide those of all
buckets, a row of it if they have as many.

Shape suffixes: U units, G grains, E early grains, L late grains.
"""

from collections.abc import Callable, Sequence
from functools import cached_property
from itertools import accumulate
from math import gcd

import torch

__all__ = ["EarlyRows", "Split"]

Counts = list[list[int]]  # [rank][bucket] units


class Split:
    """Says which units of a batch travel early, to or from all ranks.

    Args:
        early_U: for each unit, in the order (rank, bucket).
        counts: [rank][bucket] units.
        dims: columns of each bucket's rows.

    Attributes:
        early: [rank][bucket] units that travel early.
        late: [rank][bucket] units that travel late.
    """

    def __init__(self, early_U: torch.Tensor, counts: Counts, dims: Sequence[int]) -> None:
        self._early_U = early_U
        self._counts = counts
        self._dims = dims
        self._grain = gcd(*dims)
        buckets = len(dims)
        so_far = torch.nn.functional.pad(early_U.cumsum(0), (1, 0))
        ends = list(accumulate((count for row in counts for count in row), initial=0))
        per_piece = so_far[torch.tensor(ends)].diff().tolist()
        self.early: Counts = [per_piece[i : i + buckets] for i in range(0, len(per_piece), buckets)]
        self.late: Counts = [
            [count - early for count, early in zip(of_all, of_early, strict=True)]
            for of_all, of_early in zip(counts, self.early, strict=True)
        ]

    @cached_property
    def _early_G(self) -> torch.Tensor:
        """The same for each grain."""
        grains = [dim // self._grain for dim in self._dims]
        if set(grains) == {1}:
            return self._early_U
        per_unit_U = torch.tensor(grains * len(self._counts)).repeat_interleave(
            torch.tensor([count for row in self._counts for count in row])
        )
        return self._early_U.repeat_interleave(per_unit_U)

    @cached_property
    def _places_L(self) -> torch.Tensor:
        """Where the late grains are among all."""
        return (~self._early_G).nonzero().flatten()

    @cached_property
    def _order_G(self) -> torch.Tensor:
        """For each grain, where it is among the early ones with the late ones behind them."""
        places_E = self._early_G.nonzero().flatten()
        places_G = torch.cat([places_E, self._places_L])
        order_G = torch.empty_like(places_G)
        order_G[places_G] = torch.arange(places_G.numel())
        return order_G

    def late_of(self, flat: torch.Tensor) -> torch.Tensor:
        """Returns the late rows of all, flat."""
        return flat.view(-1, self._grain).index_select(0, self._places_L).view(-1)

    def join(self, early_then_late: torch.Tensor, out: torch.Tensor) -> None:
        """Writes all rows in the order of their units.

        Args:
            early_then_late: the early rows, and the late ones behind them, flat.
            out: as many elements.
        """
        torch.index_select(
            early_then_late.view(-1, self._grain),
            0,
            self._order_G,
            out=out.view(-1, self._grain),
        )


class EarlyRows:
    """The early rows of one batch, sent and on their way.

    Args:
        sent: which of the units that this rank is asked for they are.
        received: which of the units that this rank asks for.
        room: for all rows that this rank receives, the early ones first, flat.
        early_elements: how much of it the early ones take.
        arrive: waits until they are there.
        since: how often rows had changed when they were sent, see ``RowChanges``.
    """

    def __init__(
        self,
        sent: Split,
        received: Split,
        room: torch.Tensor,
        early_elements: int,
        arrive: Callable[[], None],
        since: int,
    ) -> None:
        self.sent = sent
        self.received = received
        self.room_for_late = room[early_elements:]
        self.since = since
        self._room = room
        self._arrive = arrive

    def join(self, out: torch.Tensor) -> None:
        """Writes all rows in the order of their units, once the late ones are there."""
        self._arrive()
        self.received.join(self._room, out)
