"""What an owner is asked for."""

from dataclasses import dataclass

import torch

__all__ = ["Asked"]


@dataclass(frozen=True)
class Asked:
    """What requesters ask of one bucket of this rank.

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
