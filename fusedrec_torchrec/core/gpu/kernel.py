"""What makes a kernel of a function: compiled once, whatever the sizes of batches are.

Triton compiles a kernel anew for numbers that are one, and for numbers and addresses that are
multiples of 16.  That takes seconds, on one rank, while the others wait, in the midst of training
if such a number comes with a batch.  Numbers that are the same for all batches, such as strides and
dimensions of rows, are worth it: loads of rows get wider by it.

Constants in capitals make variants, too.  The only one that comes with a batch is ``IDS``, how many
ids of a bag are taken at a time: a power of two up to 16, by the mean length of bags.
"""

import inspect
from collections.abc import Callable
from typing import Any

import triton

__all__ = ["kernel"]


def kernel(numbers: str = "", addresses: str = "") -> Callable[[Callable[..., Any]], Any]:
    """Returns what makes a kernel of a function, as ``triton.jit`` does.

    Args:
        numbers: names of arguments that change from batch to batch.
        addresses: names of arguments that point into a tensor at places that change with the batch,
            or into tensors of the user's.
    """

    def make(function: Callable[..., Any]) -> Any:
        known = inspect.signature(function).parameters.keys()
        unknown = {*numbers.split(), *addresses.split()} - known
        assert not unknown, f"{function.__name__} has no arguments {unknown}"
        return triton.jit(
            function,
            do_not_specialize=numbers.split(),
            do_not_specialize_on_alignment=addresses.split(),
        )

    return make
