"""Gradients of rows that are waited for when the rest of backward is done.

Autograd goes through a model backwards.  What was computed before the lookup, such as the bottom
layers of a DLRM, comes after it in backward; whoever waits for gradients in the midst of that keeps
these layers waiting, too.  So a pipeline has the lookup's part of the graph cut off: backward sends
gradients and goes on, and when it is over the pipeline waits for those of all modules and has them
applied.  The optimizer's step comes after that, so that learning rates are the same.
"""

from collections.abc import Callable

import torch

__all__ = ["LateGradients"]


class LateGradients:
    """The gradients of one batch, of all modules."""

    def __init__(self) -> None:
        self._waiting: list[tuple[torch.Tensor, Callable[[], torch.Tensor | None]]] = []

    def cut(self, rows: torch.Tensor, receive: Callable[[], torch.Tensor | None]) -> torch.Tensor:
        """Returns the rows without the graph that they come from.

        Args:
            rows: as looked up.
            receive: waits for their gradients; None if backward has not sent any.
        """
        self._waiting.append((rows, receive))
        return rows.detach().requires_grad_()

    def apply(self) -> None:
        """Waits for gradients and has the rows updated by them."""
        waiting, self._waiting = self._waiting, []
        received = [(rows, receive()) for rows, receive in waiting]
        arrived = [(rows, gradient) for rows, gradient in received if gradient is not None]
        if arrived:
            rows_of, gradients = zip(*arrived, strict=True)
            torch.autograd.backward(list(rows_of), list(gradients))
