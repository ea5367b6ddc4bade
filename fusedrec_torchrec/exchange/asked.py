"""What an owner is asked for."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

__all__ = ["Asked", "joined"]


@dataclass(frozen=True)
class Asked:
    """What requesters ask of one bucket or physical table of this rank.

    Attributes:
        rows_R: local rows.
        offsets_U1: where the bags begin that are to be pooled; None if every row is a unit.
        weights_R: weights of the rows of bags; None if there are none.
    """

    rows_R: torch.Tensor
    offsets_U1: torch.Tensor | None = None
    weights_R: torch.Tensor | None = None

    def row_gradients(self, gradient_UD: torch.Tensor) -> torch.Tensor:
        """Returns the gradient of each of the rows, from those of the units."""
        if self.offsets_U1 is None:
            return gradient_UD
        unit_R = torch.arange(gradient_UD.size(0), device=gradient_UD.device).repeat_interleave(
            self.offsets_U1.diff(), output_size=self.rows_R.numel()
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
    assert bags.offsets_U1 is not None
    lengths_U = bags.offsets_U1.diff()
    lengths = lengths_U.split(units_of_rank)
    row_pieces, ids = rows.rows_R.split(rows_of_rank), bags.rows_R.split(ids_of_rank)
    ones = [torch.ones_like(piece, dtype=lengths_U.dtype) for piece in row_pieces]
    offsets = torch.ops.fbgemm.asynchronous_complete_cumsum(_in_turn(ones, lengths))
    weights = None
    if bags.weights_R is not None:
        row_weights = [torch.ones_like(one, dtype=bags.weights_R.dtype) for one in ones]
        weights = _in_turn(row_weights, bags.weights_R.split(ids_of_rank))
    return Asked(_in_turn(row_pieces, ids), offsets, weights)


def _in_turn(rows: Sequence[torch.Tensor], bags: Sequence[torch.Tensor]) -> torch.Tensor:
    return torch.cat([piece for pair in zip(rows, bags, strict=True) for piece in pair])
