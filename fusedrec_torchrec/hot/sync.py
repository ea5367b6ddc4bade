"""Gradients of the hot rows, from all ranks: the same update of every replica.

Sent as early in backward as possible, awaited before the next use.  Two ways:

- *sparse*, an all-gather: every rank sends the rows it touched and their slots.  FBGEMM then sums
  them in the order of the ranks, as the owner of a row would;
- *dense*, an all-reduce over all slots, with a flag for those that were touched.

All ranks know how many rows each of them touched and take the way with fewer bytes.

With ``every`` > 1 a rank goes on alone in between.  Each step updates its own replicas for the time
being, with the gradient of its own batch, and adds this gradient to a sum.  Every so many steps the
provisional updates are undone and the sums of all ranks make one update: as if the steps in between
had been one large batch.  So replicas agree again on all ranks, to the last bit.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torchrec.distributed.comm_ops import get_gradient_division

from fusedrec_torchrec.exchange.buffers import Buffers
from fusedrec_torchrec.hot.replica import Replica

__all__ = ["GradientSync"]


@dataclass
class _InFlight:
    work: dist.Work | None
    sent: torch.Tensor
    received: torch.Tensor
    most: list[int] | None  # of each bucket; None if dense
    dtype: torch.dtype
    settings: list[tuple[torch.Tensor, object]]


class GradientSync:
    """Keeps the replicas of all buckets in sync.

    Args:
        pg: the process group.
        replicas: of each bucket.
        every: steps from one sync to the next.
    """

    def __init__(self, pg: dist.ProcessGroup, replicas: Sequence[Replica], every: int = 1) -> None:
        self._pg = pg
        self._replicas = replicas
        self._every = every
        self._buffers = Buffers()
        self._in_flight: _InFlight | None = None
        self._sums = [_Sums(replica) for replica in replicas] if every > 1 else []
        self._steps = 0  # since the last sync
        self._most = [0] * len(replicas)  # slots touched since then, at most

    def reconciled(self, k: int) -> list[torch.Tensor]:
        """A bucket's rows as they were after the last sync, which all ranks have in common."""
        return self._sums[k].base if self._sums else self._replicas[k].tensors

    def start(
        self, slots: Sequence[torch.Tensor], gradients: Sequence[torch.Tensor], most: Sequence[int]
    ) -> None:
        """Takes the gradients of one batch.

        Args:
            slots: of each bucket, the slots that the batch used, each once.
            gradients: of each bucket, a row for each of its slots.
            most: of each bucket, how many slots the rank with most of them used.
        """
        self.finish()
        if self._every == 1:
            self._send(slots, gradients, list(most))
            return
        self._steps += 1
        self._most = [
            min(replica.capacity, before + now)
            for replica, before, now in zip(self._replicas, self._most, most, strict=True)
        ]
        for sums, slots_M, gradients_MD in zip(self._sums, slots, gradients, strict=True):
            sums.add(slots_M, gradients_MD)
        if self._steps == self._every:
            self.reconcile(gradients[0].dtype)
        else:
            # The part of the mean that is this rank's, for the whole of it.
            factor = self._pg.size() if get_gradient_division() else 1
            for replica, slots_M, gradients_MD in zip(
                self._replicas, slots, gradients, strict=True
            ):
                replica.update(slots_M, gradients_MD * factor, replica.settings())

    def reconcile(self, dtype: torch.dtype = torch.float32) -> None:
        """Starts a sync of what has not been synced yet; all ranks must come here together."""
        if not self._steps:
            return
        slots = [sums.touched() for sums in self._sums]
        gradients = [
            sums.sum.index_select(0, slots_M).to(dtype)
            for sums, slots_M in zip(self._sums, slots, strict=True)
        ]
        self._send(slots, gradients, self._most)
        self.forget()

    def forget(self) -> None:
        """Begins anew: nothing has been touched since the last sync."""
        self._steps, self._most = 0, [0] * len(self._replicas)

    def reset(self) -> None:
        """The replicas have other values now, on all ranks."""
        self.forget()
        for sums in self._sums:
            sums.reset()

    def finish(self) -> None:
        """Waits for the gradients of all ranks and updates the replicas."""
        if self._in_flight is None:
            return
        arrived, self._in_flight = self._in_flight, None
        if arrived.work is not None:
            arrived.work.wait()
        for sums in self._sums:
            sums.restore()
        for k, (slots, gradients) in enumerate(self._arrived(arrived)):
            if slots.numel():
                self._replicas[k].update(slots, gradients, arrived.settings[k])
            if self._sums:
                self._sums[k].keep(slots)

    def _send(
        self,
        slots: Sequence[torch.Tensor],
        gradients: Sequence[torch.Tensor],
        most: list[int],
    ) -> None:
        if not any(most):
            return
        dtype, device, ranks = gradients[0].dtype, gradients[0].device, self._pg.size()
        words = sum(
            count * (1 + replica.dim * dtype.itemsize // 4)
            for count, replica in zip(most, self._replicas, strict=True)
        )
        elements = sum(replica.capacity * (replica.dim + 1) for replica in self._replicas)
        settings = [replica.settings() for replica in self._replicas]
        # Every rank receives the rows of all others, or sends and receives all slots but its own
        # share, once to sum up and once to spread.
        if (ranks - 1) * words <= 2 * elements * (ranks - 1) / ranks:
            sent = self._buffers.take("hot sent", (words,), torch.int32, device)
            self._pack(sent, slots, gradients, most)
            received, work = sent, None
            if ranks > 1:
                received = self._buffers.take("hot received", (ranks * words,), torch.int32, device)
                work = dist.all_gather_single(received, sent, group=self._pg, async_op=True)
            self._in_flight = _InFlight(work, sent, received, most, dtype, settings)
        else:
            sent = self._buffers.take("hot sums", (elements,), torch.float32, device).zero_()
            for (sums, touched), slots_M, gradients_MD in zip(
                self._dense(sent), slots, gradients, strict=True
            ):
                sums.index_copy_(0, slots_M.long(), gradients_MD.float())
                touched.index_fill_(0, slots_M.long(), 1)
            work = dist.all_reduce(sent, group=self._pg, async_op=True) if ranks > 1 else None
            self._in_flight = _InFlight(work, sent, sent, None, dtype, settings)

    def _pack(
        self,
        sent: torch.Tensor,
        slots: Sequence[torch.Tensor],
        gradients: Sequence[torch.Tensor],
        most: list[int],
    ) -> None:
        """Slots of all buckets, then gradients of all buckets; the rest goes to the spare rows."""
        blocks = sent[: sum(most)].split(most)
        for block, replica, slots_M in zip(blocks, self._replicas, slots, strict=True):
            block[: slots_M.numel()] = slots_M
            block[slots_M.numel() :] = replica.spare
        sizes = [n * replica.dim for n, replica in zip(most, self._replicas, strict=True)]
        blocks = sent[sum(most) :].view(gradients[0].dtype).split(sizes)
        for block, gradients_MD in zip(blocks, gradients, strict=True):
            block[: gradients_MD.numel()] = gradients_MD.view(-1)
            block[gradients_MD.numel() :] = 0

    def _dense(self, flat: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Each bucket's [slots, dim] and [slots] of the flat buffer."""
        sizes = [n for r in self._replicas for n in (r.capacity * r.dim, r.capacity)]
        pieces = flat.split(sizes)
        return [
            (pieces[2 * k].view(-1, replica.dim), pieces[2 * k + 1])
            for k, replica in enumerate(self._replicas)
        ]

    def _arrived(self, arrived: _InFlight) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Slots and gradients of each bucket."""
        if arrived.most is None:
            return [
                _touched(sums, touched, arrived.dtype, replica)
                for (sums, touched), replica in zip(
                    self._dense(arrived.received), self._replicas, strict=True
                )
            ]
        most, dims = arrived.most, [replica.dim for replica in self._replicas]
        received = arrived.received.view(self._pg.size(), -1)
        slots = received[:, : sum(most)].split(most, dim=1)
        rows = received[:, sum(most) :].view(arrived.dtype)
        gradients = rows.split([n * dim for n, dim in zip(most, dims, strict=True)], dim=1)
        return [
            (slots_WM.reshape(-1), gradients_WMD.reshape(-1, dim))
            for slots_WM, gradients_WMD, dim in zip(slots, gradients, dims, strict=True)
        ]


def _touched(
    sums: torch.Tensor, touched: torch.Tensor, dtype: torch.dtype, replica: Replica
) -> tuple[torch.Tensor, torch.Tensor]:
    """Slots that some rank touched and their gradients.

    On CUDA all slots, where that makes no difference: to find out which would be a host
    synchronisation.  Without weight decay and with some eps, a gradient of zero changes nothing.
    """
    arguments = replica.kernel.table.optimizer_args
    if touched.device.type != "cpu" and not arguments.weight_decay and arguments.eps:
        return torch.arange(len(sums), dtype=torch.int32, device=sums.device), sums.to(dtype)
    slots = touched.nonzero().flatten()
    return slots.int(), sums.index_select(0, slots).to(dtype)


class _Sums:
    """What a bucket's replica needs to go on alone for some steps."""

    def __init__(self, replica: Replica) -> None:
        self._replica = replica
        self.base = [tensor.clone() for tensor in replica.tensors]
        self.sum = torch.zeros(
            replica.capacity + 1, replica.dim, device=replica.tensors[0].device
        )
        self._is_touched = torch.zeros(
            replica.capacity + 1, dtype=torch.bool, device=self.sum.device
        )

    def add(self, slots_M: torch.Tensor, gradients_MD: torch.Tensor) -> None:
        self.sum.index_add_(0, slots_M.long(), gradients_MD.to(self.sum.dtype))
        self._is_touched.index_fill_(0, slots_M.long(), True)

    def touched(self) -> torch.Tensor:
        return self._is_touched.nonzero().flatten().int()

    def restore(self) -> None:
        """Undoes what this rank did alone."""
        slots = self._is_touched.nonzero().flatten()
        for tensor, base in zip(self._replica.tensors, self.base, strict=True):
            tensor.index_copy_(0, slots, base.index_select(0, slots))
        self.sum.index_fill_(0, slots, 0)
        self._is_touched.index_fill_(0, slots, False)

    def reset(self) -> None:
        for tensor, base in zip(self._replica.tensors, self.base, strict=True):
            base.copy_(tensor)
        self.sum.zero_()
        self._is_touched.zero_()

    def keep(self, slots: torch.Tensor) -> None:
        """From here on the rows are what all ranks have in common."""
        for tensor, base in zip(self._replica.tensors, self.base, strict=True):
            base.index_copy_(0, slots.long(), tensor.index_select(0, slots))
