"""NCCL on emulated devices: gloo, in the same memory."""

from collections import deque
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._pytree import tree_map

from tests.emulated_cuda import device
from tests.emulated_cuda.call import Call
from tests.emulated_cuda.memory import cpu_view, is_on_device

__all__ = ["collective", "forget_waited", "replace_nccl"]

GLOO = "cpu:gloo,cuda:gloo"
# Views of tensors that gloo may still use after the call has returned.
_IN_USE: deque[list[Any]] = deque(maxlen=64)


def collective(call: Call) -> Any:
    """Runs a collective of tensors on emulated devices."""
    for value in call.values:
        if is_on_device(value) and not value.is_contiguous():
            raise ValueError(f"{call.name}: NCCL takes contiguous tensors only")
    device.mark("collective", call.name)
    views = [
        cpu_view(value)
        if is_on_device(value)
        else torch.device("cpu")
        if isinstance(value, torch.device)
        else value
        for value in call.values
    ]
    _IN_USE.append(views)
    with torch.no_grad():
        results = call.with_values(views).run()
    own = {
        view.data_ptr(): value
        for view, value in zip(views, call.values, strict=True)
        if isinstance(view, torch.Tensor)
    }
    return tree_map(
        lambda result: (
            own.get(result.data_ptr(), result) if isinstance(result, torch.Tensor) else result
        ),
        results,
    )


def forget_waited() -> None:
    """Lets go of all tensors that collectives had; those still under way hold their own."""
    _IN_USE.clear()


def replace_nccl() -> None:
    """Has process groups that are asked for NCCL take gloo."""
    make_default, make_another = dist.init_process_group, dist.new_group

    def init_process_group(backend: str | None = None, *args: Any, **kwargs: Any) -> Any:
        kwargs.pop("device_id", None)
        return make_default(_replaced(backend), *args, **kwargs)

    def new_group(*args: Any, **kwargs: Any) -> Any:
        return make_another(*args, **{**kwargs, "backend": _replaced(kwargs.get("backend"))})

    dist.init_process_group = init_process_group
    dist.new_group = new_group


def _replaced(backend: str | None) -> str | None:
    return GLOO if backend is not None and "nccl" in backend else backend
