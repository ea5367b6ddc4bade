"""How the backward functions of the exchange run: in full precision, and once.

Autocast would run some of torch's operators in bfloat16, also in backward if that is called inside
of it; sums of gradients and their products with rows are not to be rounded so.  And none of these
functions can be differentiated themselves: that would need a third exchange.
"""

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch.autograd import Function

__all__ = ["first_order"]

Backward = Callable[..., Any]


class _Refuse(Function):
    """Gradients that cannot be differentiated, and say so if somebody tries."""

    @staticmethod
    def forward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(gradient.view_as(gradient) for gradient in gradients)

    @staticmethod
    def backward(ctx: Any, *_: torch.Tensor) -> Any:
        raise RuntimeError(
            "second-order gradients through fused tables are not supported (create_graph=True): "
            "leave the embeddings out of what is differentiated twice, for example by detach()"
        )


def first_order(backward: Backward) -> Backward:
    """Decorates ``backward`` of an autograd function."""

    @wraps(backward)
    def run(ctx: Any, *gradients: torch.Tensor | None) -> Any:
        given = [gradient for gradient in gradients if gradient is not None]
        kind = given[0].device.type if given else "cpu"
        with torch.no_grad(), torch.autocast(kind, enabled=False):
            result = backward(ctx, *gradients)
        if not torch.is_grad_enabled():
            return result
        several = result if isinstance(result, tuple) else (result,)
        # Only what is connected to a graph can be differentiated, so can refuse to be.
        loose = [value.detach().requires_grad_() for value in several if value is not None]
        refusing = iter(_Refuse.apply(*loose)) if loose else iter(())
        answer = tuple(None if value is None else next(refusing) for value in several)
        return answer if isinstance(result, tuple) else answer[0]

    return run
