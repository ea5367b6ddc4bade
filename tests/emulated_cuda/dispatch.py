"""Runs every operator twice: on the emulated device, where nothing is computed, and on CPU.

The first call is the real host code of torch or FBGEMM, which checks devices and shapes, allocates
and launches.  The second computes the values, from copies of the arguments, and they are written
into what the first has returned.  Both must have the same shapes and types.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_unflatten

from tests.emulated_cuda import device
from tests.emulated_cuda.call import Call
from tests.emulated_cuda.collectives import collective
from tests.emulated_cuda.counts import SyncPlaces
from tests.emulated_cuda.fbgemm import with_size
from tests.emulated_cuda.memory import cpu_view, is_on_device
from tests.emulated_cuda.oracles import LEAVE, ORACLES

__all__ = ["EmulatedDispatch"]


class EmulatedDispatch(TorchDispatchMode):
    """Takes every operator that has to do with an emulated device."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        call = Call(func, args, kwargs or {})
        if not call.on_device():
            return call.run()
        if func.namespace == "c10d":
            return collective(call)
        with SyncPlaces.watch(call.name):
            return _computed(call) if call.computes() else call.run()


def _computed(call: Call) -> Any:
    call = with_size(call)
    on_cpu = call.on_cpu()  # before the host code, which may change arguments
    outputs = None
    if call.size_from_values():  # its host code would read a number that no kernel has written
        device.mark("sync", f"size of {call.name}")
    elif call.uses_cublas():
        device.mark("kernel", call.name)
    else:
        outputs = call.run()
    with torch.no_grad():
        results = _results(call, on_cpu)
        if results is LEAVE:
            return outputs
        call.take_changes(on_cpu)
        if call.size_from_values() or call.uses_cublas():
            return _new_outputs(call, results)
        return _with_results(call, outputs, results)


def _results(call: Call, on_cpu: Call) -> Any:
    function = _oracle_of(call)
    try:
        return on_cpu.run() if function is None else function(**on_cpu.named())
    except NotImplementedError as error:
        if "Could not run" not in str(error):
            raise
        raise NotImplementedError(
            f"{call.name} has no CPU implementation: register one in tests/emulated_cuda "
            f"(oracles.py): {error}"
        ) from error


def _oracle_of(call: Call) -> Callable[..., Any] | None:
    function = ORACLES.get(call.name, ORACLES.get(call.plain_name))
    if function is None and "split_embedding" in call.name:
        kind = "forward" if "forward" in call.name else "backward"
        batches = "variable_" if "_vbe" in call.name else ""
        host_tables = ORACLES[f"split_embedding_{batches}{kind}"]
        return lambda **arguments: host_tables(call.func, **arguments)
    return function


def _new_outputs(call: Call, results: Any) -> Any:
    """Returns results on the device, where the host code has made no outputs."""
    where = next(value.device for value in call.values if is_on_device(value))
    flat, spec = tree_flatten(results)
    outputs = [torch.empty(r.shape, dtype=r.dtype, device=where) for r in flat]
    for output, result in zip(outputs, flat, strict=True):
        cpu_view(output).copy_(result)
    return tree_unflatten(outputs, spec)


def _with_results(call: Call, outputs: Any, results: Any) -> Any:
    """Writes results into the outputs."""
    own, spec = tree_flatten(outputs)
    computed, _ = tree_flatten(results)
    if _oracle_of(call) is not None:
        computed += [LEAVE] * (len(own) - len(computed))
    assert len(own) == len(computed), (
        f"{call.name}: {len(own)} outputs on CUDA, {len(computed)} on CPU"
    )
    changed = {id(call.values[i]) for i in call.written_to()}
    for i, (output, result) in enumerate(zip(own, computed, strict=True)):
        if result is LEAVE:
            continue
        if not isinstance(output, torch.Tensor):
            own[i] = result
            continue
        if not isinstance(result, torch.Tensor) or id(output) in changed:
            continue
        if output.shape != result.shape:
            if output.numel() == result.numel() == 0 or ("_embedding_bag" in call.name and i):
                continue  # of no consequence, and auxiliary outputs
            raise AssertionError(
                f"{call.name}: shape {tuple(output.shape)} on CUDA, {tuple(result.shape)} on CPU"
            )
        if output.dtype != result.dtype and call.func.namespace != "fbgemm":
            raise AssertionError(f"{call.name}: {output.dtype} on CUDA, {result.dtype} on CPU")
        (cpu_view(output) if is_on_device(output) else output).copy_(result)
    return tree_unflatten(own, spec)
