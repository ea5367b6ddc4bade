"""What an owner is asked for."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch

__all__ = ["Asked", "joined"]


@dataclass(frozen=True)
class Asked:
    """What requesters ask of one bucket, or of several in one call.

    Attributes:
        rows_R: local rows.
        lengths_U: how many of the rows are in each bag that is to be pooled; None if every row is a
            unit.
        weights_R: weights of the rows of bags; None if there are none.
    """

    rows_R: torch.Tensor
    lengths_U: torch.Tensor | None = None
    weights_R: torch.Tensor | None = None

    @cached_property
    def offsets_U1(self) -> torch.Tensor | None:
        """Where the bags begin; None if every row is a unit."""
        if self.lengths_U is None:
            return None
        offsets_U1: torch.Tensor = torch.ops.fbgemm.asynchronous_complete_cumsum(self.lengths_U)
        return offsets_U1

    @property
    def units(self) -> int:
        """How many rows or sums of rows are asked for."""
        return (self.rows_R if self.lengths_U is None else self.lengths_U).numel()

    def only(self, kept_U: torch.Tensor) -> "Asked":
        """Returns some of the units.

        Args:
            kept_U: whether each of them is one.
        """
        if self.lengths_U is None:
            return Asked(self.rows_R[kept_U])
        kept_R = kept_U.repeat_interleave(self.lengths_U, output_size=self.rows_R.numel())
        weights_R = None if self.weights_R is None else self.weights_R[kept_R]
        return Asked(self.rows_R[kept_R], self.lengths_U[kept_U], weights_R)

    def row_gradients(self, gradient_UD: torch.Tensor) -> torch.Tensor:
        """Returns the gradient of each of the rows, from those of the units."""
        if self.lengths_U is None:
            return gradient_UD
        unit_R = torch.arange(gradient_UD.size(0), device=gradient_UD.device).repeat_interleave(
            self.lengths_U, output_size=self.rows_R.numel()
        )
        gradient_RD = gradient_UD.index_select(0, unit_R)
        return gradient_RD if self.weights_R is None else gradient_RD * self.weights_R[:, None]


def joined(
    rows: Asked,
    bags: Asked,
    rows_of_rank: list[int],
    units_of_rank: list[int],
    ids_of_rank: list[int],
) -> Asked:
    """Returns what is asked of a physical table: rows by themselves and bags, rank after rank.

    Args:
        rows: that are asked for by themselves.
        bags: that are to be pooled.
        rows_of_rank: how many rows each requester asks for.
        units_of_rank: how many bags each requester asks for.
        ids_of_rank: how many ids these have.
    """
    assert bags.lengths_U is not None
    lengths = bags.lengths_U.split(units_of_rank)
    row_pieces, ids = rows.rows_R.split(rows_of_rank), bags.rows_R.split(ids_of_rank)
    ones = [torch.ones_like(piece, dtype=bags.lengths_U.dtype) for piece in row_pieces]
    weights = None
    if bags.weights_R is not None:
        row_weights = [torch.ones_like(one, dtype=bags.weights_R.dtype) for one in ones]
        weights = _in_turn(row_weights, bags.weights_R.split(ids_of_rank))
    return Asked(_in_turn(row_pieces, ids), _in_turn(ones, lengths), weights)


def _in_turn(rows: Sequence[torch.Tensor], bags: Sequence[torch.Tensor]) -> torch.Tensor:
    return torch.cat([piece for pair in zip(rows, bags, strict=True) for piece in pair])
