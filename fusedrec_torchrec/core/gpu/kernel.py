"""What makes a kernel of a function: compiled once, and launched without looking for it each time.

Triton compiles a kernel anew for numbers that are one, and for numbers and addresses that are
multiples of 16.  That takes seconds, on one rank, while the others wait, in the midst of training
if such a number comes with a batch.  Numbers that are the same for all batches, such as strides and
dimensions of rows, are worth it: loads of rows get wider by it.

Constants in capitals make variants, too.  The only one that comes with a batch is ``IDS``, how many
ids of a bag are taken at a time: a power of two up to 16, by the mean length of bags.

For every launch Triton binds arguments to their names, describes each of them, and looks the kernel
up by all descriptions, which takes the host longer than the launch.  ``Kernel`` leaves that to
Triton the first time, and then remembers what it has found by what decides on it: types, which
addresses and numbers are multiples of 16, which numbers are one or need 64 bits, and constants.
"""

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import triton
from triton import knobs
from triton.runtime import driver
from triton.runtime.jit import JITFunction

__all__ = ["Kernel", "Variant", "kernel"]

INT32_MIN, INT32_MAX = -(2**31), 2**31 - 1


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
        if knobs.runtime.interpret:
            return triton.jit(function)
        return Kernel(function, numbers.split(), addresses.split())

    return make


class Kernel(JITFunction):
    """Is a kernel that remembers which of its variants it has launched.

    Arguments are given in their order, constants by name.

    Args:
        function: what Triton compiles.
        numbers, addresses: names of arguments of which only the type decides on the variant.

    Attributes:
        variants: those that were launched, by what decides on them.
    """

    def __init__(
        self, function: Callable[..., Any], numbers: list[str], addresses: list[str]
    ) -> None:
        super().__init__(
            function, do_not_specialize=numbers, do_not_specialize_on_alignment=addresses
        )
        self._is_special = [name not in (*numbers, *addresses) for name in self.arg_names]
        self.variants: dict[tuple[Any, ...], Variant] = {}

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return partial(self._launch, grid)

    def _launch(self, grid: tuple[int, ...], *args: Any, **constants: Any) -> None:
        device = driver.active.get_current_device()
        decisive: list[Any] = [device, *constants.items()]
        values: list[Any] = []
        for argument, is_special in zip(args, self._is_special, strict=False):
            if isinstance(argument, torch.Tensor):
                address = argument.data_ptr()
                values.append(address)
                decisive.append(argument.dtype)
                if is_special:
                    decisive.append(address % 16 == 0)
            else:
                values.append(argument)
                decisive.append(_described(argument, is_special))
        key = tuple(decisive)
        variant = self.variants.get(key)
        if variant is not None and not _is_watched():
            variant.launch(grid, driver.active.get_current_stream(device), values)
            return
        compiled = self.run(*args, grid=grid, warmup=False, **constants)
        names = self.arg_names[len(args) :]
        self.variants[key] = Variant(compiled, [constants[name] for name in names])


class Variant:
    """A compiled kernel, as its launcher wants it.

    Args:
        compiled: what Triton has compiled and launched once.
        constants: in the order of the arguments; they come behind all others.
    """

    def __init__(self, compiled: Any, constants: list[Any]) -> None:
        self.compiled = compiled
        self._run, self._constants = compiled.run, constants
        self._function, self._metadata = compiled.function, compiled.packed_metadata

    def launch(self, grid: tuple[int, ...], stream: int, values: list[Any]) -> None:
        x, y, z = (*grid, 1, 1)[:3]
        none = (None, None, None)  # for those who watch launches
        self._run(x, y, z, stream, self._function, self._metadata, *none, *values, *self._constants)


def _described(argument: Any, is_special: bool) -> Any:
    """Returns what of a number decides on the variant, as for Triton."""
    if type(argument) is not int:  # of others, bool among them, the type decides
        return type(argument)
    fits = INT32_MIN <= argument <= INT32_MAX
    if not is_special:
        return fits or argument.bit_length()
    return fits or argument.bit_length(), argument == 1, argument % 16 == 0


def _is_watched() -> bool:
    """Tells whether somebody, such as a profiler, wants to be told of launches."""
    runtime = knobs.runtime
    return bool(runtime.launch_enter_hook.calls or runtime.launch_exit_hook.calls)
