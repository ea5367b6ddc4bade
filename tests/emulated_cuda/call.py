"""One call of an operator, as the oracle sees it."""

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch.utils._pytree import tree_flatten, tree_unflatten

from tests.emulated_cuda.memory import cpu_copy, cpu_view, is_on_device

__all__ = ["DISTINCT_UPDATE", "Call"]

# Operators that compute nothing: they make tensors without values, or show memory in another way.
WITHOUT_VALUES = {
    "aten::_local_scalar_dense",  # reads memory that is the host's anyway
    "aten::_pin_memory",
    "aten::_reshape_alias",
    "aten::alias",
    "aten::detach",
    "aten::empty.memory_format",
    "aten::empty_like",
    "aten::empty_strided",
    "aten::is_pinned",
    "aten::lift_fresh",
    "aten::new_empty",
    "aten::new_empty_strided",
    "aten::record_stream",
    "aten::resize_",
    "aten::set_",
    "aten::set_.source_Storage",
    "aten::set_.source_Storage_storage_offset",
    "aten::set_.source_Tensor",
}
# Operators whose outputs have as many elements as the device finds.
SIZE_FROM_VALUES = ("nonzero", "unique", "masked_select", "isin")
# Operators of cuBLAS, which brings a CUDA runtime of its own and finds no GPU with it.
CUBLAS = {"aten::addmm", "aten::baddbmm", "aten::bmm", "aten::mm"}

DISTINCT_UPDATE = "fbgemm::split_embedding_rowwise_adagrad_update"
# Arguments of FBGEMM's backwards of Adam that are changed, although their schemas do not say so.
CHANGED_ALL_THE_SAME = {f"momentum{i}_{place}" for i in (1, 2) for place in ("dev", "uvm")}
# And of its update of distinct rows.
CHANGED_BY_UPDATES = {"dev_weights"}


@dataclass(frozen=True)
class Call:
    """One call of an operator.

    Attributes:
        func: the operator.
        args, kwargs: what it is called with.
    """

    func: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    @cached_property
    def name(self) -> str:
        """Namespace, name and overload of the operator."""
        schema = self.func._schema
        return schema.name + (f".{schema.overload_name}" if schema.overload_name else "")

    @property
    def plain_name(self) -> str:
        """Namespace and name."""
        name: str = self.func._schema.name
        return name

    @cached_property
    def _flat(self) -> tuple[list[Any], Any]:
        return tree_flatten((self.args, self.kwargs))

    @property
    def values(self) -> list[Any]:
        """All arguments, lists taken apart."""
        return self._flat[0]

    def on_device(self) -> bool:
        """Returns whether the call has to do with an emulated device."""
        return any(
            is_on_device(value) or (isinstance(value, torch.device) and value.type == "cuda")
            for value in self.values
        )

    def computes(self) -> bool:
        """Returns whether the operator computes values."""
        return not (
            self.func.is_view
            or self.name in WITHOUT_VALUES
            or self.name.startswith("fbgemm::new_")
            or "is_uvm" in self.name
            or self.func.namespace in ("prim", "profiler")
        )

    def size_from_values(self) -> bool:
        """Returns whether the host code waits for the device to know the size of the output."""
        if self.name == "aten::index.Tensor":
            masks = (torch.bool, torch.uint8)
            return any(isinstance(v, torch.Tensor) and v.dtype in masks for v in self.values[1:])
        if self.name == "aten::repeat_interleave.Tensor":
            return self.kwargs.get("output_size") is None
        if self.name == "aten::nonzero_static":
            return False
        return self.func.namespace == "aten" and any(s in self.name for s in SIZE_FROM_VALUES)

    def uses_cublas(self) -> bool:
        """Returns whether the host code calls a library that is not emulated."""
        return self.name in CUBLAS

    def run(self) -> Any:
        """Calls the operator; on an emulated device that is its real host code."""
        return self.func(*self.args, **self.kwargs)

    def named(self) -> dict[str, Any]:
        """Returns the arguments by their names."""
        names = [argument.name for argument in self.func._schema.arguments]
        return {**dict(zip(names, self.args, strict=False)), **self.kwargs}

    def with_values(self, values: list[Any]) -> "Call":
        """Returns the call with other arguments, in the order of ``values``."""
        args, kwargs = tree_unflatten(values, self._flat[1])
        return Call(self.func, args, kwargs)

    def on_cpu(self) -> "Call":
        """Returns the call as the CPU should have it; tensors are copies."""
        call = self.with_values([cpu_copy(value) for value in self.values])
        if call.kwargs.get("pin_memory"):
            call.kwargs["pin_memory"] = False
        return call

    def written_to(self) -> list[int]:
        """Returns which of ``values`` the schema says the operator changes."""
        arguments, named = self.func._schema.arguments, self.named()
        changed = {
            id(value)
            for argument in arguments
            if (argument.alias_info is not None and argument.alias_info.is_write)
            or argument.name in CHANGED_ALL_THE_SAME
            or (argument.name in CHANGED_BY_UPDATES and self.name == DISTINCT_UPDATE)
            for value in tree_flatten(named.get(argument.name))[0]
            if isinstance(value, torch.Tensor)
        }
        return [i for i, value in enumerate(self.values) if id(value) in changed]

    def take_changes(self, on_cpu: "Call") -> None:
        """Does to the arguments what was done to their copies."""
        for i in self.written_to():
            own, copy = self.values[i], on_cpu.values[i]
            target = cpu_view(own) if is_on_device(own) else own.detach()
            if target.shape == copy.shape:
                target.copy_(copy)
