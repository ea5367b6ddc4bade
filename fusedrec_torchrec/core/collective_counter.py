"""Counts collectives and the bytes they put on the wire, as they happen.

Bytes on the wire are what a rank sends to *other* ranks.  For an all-to-all that is exact, from
its split sizes, and for messages from one rank to another.  For the others it is what the usual
ring algorithm sends, per rank.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from fusedrec_torchrec.compat.dispatch import TorchDispatchMode, operator_name

__all__ = ["Collective", "CollectiveCounter"]

NAMES = {
    "alltoall_base_": "all_to_all",
    "alltoall_": "all_to_all",
    "allreduce_": "all_reduce",
    "allreduce_coalesced_": "all_reduce",
    "_allgather_base_": "all_gather",
    "allgather_": "all_gather",
    "_reduce_scatter_base_": "reduce_scatter",
    "reduce_scatter_": "reduce_scatter",
    "broadcast_": "broadcast",
    "barrier": "barrier",
    "send": "send",
}
RECEIVE = "recv_"  # the other half of a send


@dataclass(frozen=True)
class Collective:
    """One collective as this rank saw it: what it was, of which type, and bytes to other ranks."""

    name: str
    dtype: torch.dtype | None
    bytes_sent: int


class CollectiveCounter(TorchDispatchMode):
    """Records the collectives that are launched while it is active.

    It sees every operator, so it slows a step down: use it to count, not to time.

    Example::

        with CollectiveCounter() as counter:
            model(batch).sum().backward()
        print(len(counter.collectives), counter.bytes_sent())
    """

    def __init__(self) -> None:
        super().__init__()
        self.collectives: list[Collective] = []

    def bytes_sent(self, name: str | None = None) -> int:
        """Returns the bytes sent to other ranks, by all collectives or by those of one name."""
        return sum(c.bytes_sent for c in self.collectives if name in (None, c.name))

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if func.namespace == "c10d":
            name = operator_name(func)
            if name != RECEIVE:
                self.collectives.append(_record(name, args))
        return func(*args, **(kwargs or {}))


def _record(op: str, args: tuple[Any, ...]) -> Collective:
    tensors = [t for arg in args for t in _tensors(arg)]
    group = next((g for arg in args if (g := _group(arg)) is not None), None)
    dtype = tensors[0].dtype if tensors else None
    world_size = 1 if group is None else group.size()
    if op == "alltoall_base_":
        assert group is not None
        sent = args[1]
        splits = args[4] or [sent.size(0) // world_size] * world_size
        row_bytes = sent.element_size() * (sent[:1].numel() if sent.size(0) else 0)
        return Collective("all_to_all", dtype, (sum(splits) - splits[group.rank()]) * row_bytes)
    # The larger side: what is gathered, or what is reduced and scattered.
    whole = args[1] if NAMES.get(op) == "reduce_scatter" else args[0] if args else ()
    total = sum(t.numel() * t.element_size() for t in _tensors(whole))
    share = {"all_reduce": 2.0, "broadcast": 1.0, "all_gather": 1.0, "reduce_scatter": 1.0}
    name = NAMES.get(op, op)
    if name == "send":
        return Collective(name, dtype, total)
    ring = share.get(name, 1.0) * (world_size - 1) / world_size
    return Collective(name, dtype, round(total * ring))


def _tensors(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, list | tuple):
        return [t for item in value for t in _tensors(item)]
    return []


def _group(value: Any) -> dist.ProcessGroup | None:
    if isinstance(value, torch.ScriptObject):
        try:
            return dist.ProcessGroup.unbox(value)
        except (RuntimeError, TypeError):  # some other object, such as a reduce op
            return None
    return None
