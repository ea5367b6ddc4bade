"""Repeats the all-to-alls of a step by themselves: how fast its messages get across.

Of a step the ids, the rows and the gradients go one after another, and within each of them nothing
waits: all messages of all tables are sent before the first is waited for.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from fusedrec_torchrec.bench.systems import System
from fusedrec_torchrec.compat.dispatch import TorchDispatchMode, operator_name

__all__ = ["Replay"]

# A tensor to receive into, one to send, and what of them is for which rank.
_AllToAll = tuple[torch.Tensor, torch.Tensor, list[int], list[int]]


class _Recorder(TorchDispatchMode):
    """Keeps the shapes of all-to-alls while it is active, in memory of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[_AllToAll] = []

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if func.namespace == "c10d" and operator_name(func) == "alltoall_base_":
            received, sent, _, received_splits, sent_splits = args[:5]
            own = (torch.zeros_like(received), torch.zeros_like(sent))
            self.seen.append((*own, list(received_splits), list(sent_splits)))
        return func(*args, **(kwargs or {}))


class Replay:
    """Holds the all-to-alls of a system's steps, ready to be repeated.

    Args:
        system: a system that has no other collectives.
        batches: this rank's; a training step is done with each.

    Attributes:
        bytes_sent: to other ranks, in a step in the mean.
    """

    def __init__(self, system: System, batches: Sequence[KeyedJaggedTensor]) -> None:
        self._steps: list[list[list[_AllToAll]]] = []
        for batch in batches:
            with _Recorder() as forward:
                outputs = system.forward(batch)
            with _Recorder() as backward:
                system.backward(outputs)
            ids = [a for a in forward.seen if not a[1].is_floating_point()]
            rows = [a for a in forward.seen if a[1].is_floating_point()]
            self._steps.append([ids, rows, backward.seen])
        rank = dist.get_rank()
        every = [a for step in self._steps for kind in step for a in kind]
        self.bytes_sent = sum(_bytes_to_others(a, rank) for a in every) / len(self._steps)

    def run(self, number: int) -> None:
        """Repeats the all-to-alls of a batch."""
        for all_to_alls in self._steps[number % len(self._steps)]:
            works = [
                dist.all_to_all_single(received, sent, into, out, async_op=True)
                for received, sent, into, out in all_to_alls
            ]
            for work in works:
                work.wait()


def _bytes_to_others(all_to_all: _AllToAll, rank: int) -> int:
    _, sent, _, splits = all_to_all
    if not splits:  # an equal share for every rank
        return sent.nbytes - sent.nbytes // dist.get_world_size()
    row = sent.nbytes // max(sent.size(0), 1)
    return row * (sum(splits) - splits[rank])
