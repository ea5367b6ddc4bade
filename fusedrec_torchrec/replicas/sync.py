"""Gradients of the hot rows, from all ranks: the same update of every replica.

Sent as early in backward as possible, awaited before the next use.  Two ways:

- *sparse*: every rank sends the rows it touched and their places to every other one.  FBGEMM then
  sums them in the order of the ranks, as the owner of a row would;
- *dense*, an all-reduce over all places, with a flag for those that were touched.

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

from fusedrec_torchrec.codecs.options import CodecOptions
from fusedrec_torchrec.compat.bucket_table import OptimizerSettings
from fusedrec_torchrec.core.buffers import Buffers
from fusedrec_torchrec.core.lost_rank import wait, waiting
from fusedrec_torchrec.core.transfer import to_device
from fusedrec_torchrec.replicas.coded import coded_gradients
from fusedrec_torchrec.replicas.replica import Replica

__all__ = ["GradientSync"]


@dataclass
class _InFlight:
    """Gradients on their way.

    Attributes:
        works: to wait for.
        sent: what must stay alive until then.
        messages: of each rank, places of all buckets and gradients of all buckets, in the bits of
            int32.  The sums, if dense.
        counts: [rank][bucket] of the places; None if dense.
        dtype: that FBGEMM wants gradients in.
        settings: of each bucket's optimizer, as they were when the gradients were sent.
    """

    works: list[dist.Work]
    sent: torch.Tensor
    messages: list[torch.Tensor]
    counts: list[list[int]] | None
    dtype: torch.dtype
    settings: list[OptimizerSettings]


class GradientSync:
    """Keeps the replicas of all buckets in sync.

    Args:
        pg: the process group.
        replicas: of each bucket.
        every: steps from one sync to the next.
        stage: what the sync is called in errors.
        codec: how gradients travel; None if as they are.
    """

    def __init__(
        self,
        pg: dist.ProcessGroup,
        replicas: Sequence[Replica],
        every: int = 1,
        stage: str = "hot sync",
        codec: CodecOptions | None = None,
    ) -> None:
        self._pg = pg
        self._stage = stage
        self._replicas = replicas
        self._dims = [replica.dim for replica in replicas]
        self._every = every
        self.coded = coded_gradients(codec, replicas)
        self._buffers = Buffers()
        self._in_flight: _InFlight | None = None
        self._sums = [_Sums(replica) for replica in replicas] if every > 1 else []
        self._steps = 0  # since the last sync

    def reconciled(self, k: int) -> list[torch.Tensor]:
        """Returns a bucket's rows as they were after the last sync, the same on all ranks."""
        return self._sums[k].base if self._sums else self._replicas[k].tensors

    def start(
        self,
        places: Sequence[torch.Tensor],
        gradients: Sequence[torch.Tensor],
        counts: list[list[int]],
        all_to_all: bool,
    ) -> None:
        """Takes the gradients of one batch.

        Args:
            places: of each bucket, the places that the batch used, each once.
            gradients: of each bucket, a row for each of its places.
            counts: [rank][bucket] places that each rank's batch used.
            all_to_all: whether the step has all-to-alls anyway.
        """
        self.finish()
        if self._every == 1:
            self._send(places, gradients, counts, all_to_all)
            return
        self._steps += 1
        for sums, places_M, gradients_MD in zip(self._sums, places, gradients, strict=True):
            sums.add(places_M, gradients_MD)
        if self._steps == self._every:
            self.reconcile(gradients[0].dtype)
        else:
            # The part of the mean that is this rank's, for the whole of it.
            factor = self._pg.size() if get_gradient_division() else 1
            for replica, places_M, gradients_MD in zip(
                self._replicas, places, gradients, strict=True
            ):
                replica.update(places_M, gradients_MD * factor, replica.settings())

    def reconcile(self, dtype: torch.dtype = torch.float32) -> None:
        """Starts a sync of what has not been synced yet; all ranks must come here together."""
        if not self._steps:
            return
        self._steps = 0
        places = [sums.touched() for sums in self._sums]
        gradients = [
            sums.sum.index_select(0, places_M).to(dtype)
            for sums, places_M in zip(self._sums, places, strict=True)
        ]
        counts = self._everywhere([places_M.numel() for places_M in places])
        self._send(places, gradients, counts, all_to_all=False)

    def _everywhere(self, counts: list[int]) -> list[list[int]]:
        """Returns what all ranks have counted."""
        own = to_device(counts, self._replicas[0].tensors[0].device)
        gathered = own.new_empty(self._pg.size() * own.numel())
        with waiting(self._pg, self._stage):
            dist.all_gather_single(gathered, own, group=self._pg)
        rows: list[list[int]] = gathered.view(self._pg.size(), -1).tolist()
        return rows

    def reset(self) -> None:
        """Begins anew: the replicas have other values now, on all ranks."""
        self._steps = 0
        for sums in self._sums:
            sums.reset()

    def finish(self) -> None:
        """Waits for the gradients of all ranks and updates the replicas."""
        if self._in_flight is None:
            return
        arrived, self._in_flight = self._in_flight, None
        for work in arrived.works:
            wait(work, self._pg, self._stage)
        for sums in self._sums:
            sums.restore()
        updates = self._dense(arrived) if arrived.counts is None else self._sparse(arrived)
        for k, (places, gradients) in enumerate(updates):
            if places.numel():
                self._replicas[k].update(places, gradients, arrived.settings[k])
            if self._sums:
                self._sums[k].keep(places)

    def _send(
        self,
        places: Sequence[torch.Tensor],
        gradients: Sequence[torch.Tensor],
        counts: list[list[int]],
        all_to_all: bool,
    ) -> None:
        if not any(map(sum, counts)):
            return
        ranks, dtype = self._pg.size(), gradients[0].dtype
        message = max(
            sum(n * (4 + dim * dtype.itemsize) for n, dim in zip(row, self._dims, strict=True))
            for row in counts
        )
        all_places = sum(replica.capacity * (replica.dim + 1) * 4 for replica in self._replicas)
        clips = any(replica.clips for replica in self._replicas)  # each rank's, not the sum
        # A message to every other rank, or all places but an own share, to sum up and to spread.
        fewer = (ranks - 1) * message <= 2 * all_places * (ranks - 1) / ranks
        if self.coded is not None or clips or fewer:
            self._in_flight = self._send_sparse(places, gradients, counts, all_to_all)
        else:
            self._in_flight = self._send_dense(places, gradients)

    def _settings(self) -> list[OptimizerSettings]:
        return [replica.settings() for replica in self._replicas]

    def _send_sparse(
        self,
        places: Sequence[torch.Tensor],
        gradients: Sequence[torch.Tensor],
        counts: list[list[int]],
        all_to_all: bool,
    ) -> _InFlight:
        rank, ranks, dtype = self._pg.rank(), self._pg.size(), gradients[0].dtype
        if self.coded is not None:
            sizes = [self.coded.words(row) for row in counts]
        else:
            words = [dim * dtype.itemsize // 4 + 1 for dim in self._dims]
            sizes = [sum(n * word for n, word in zip(row, words, strict=True)) for row in counts]
        buffer = self._buffers.take("hot messages", (sum(sizes),), torch.int32, gradients[0].device)
        # The messages of the others stand together, behind the own one or, of two, before it.
        order = [*range(ranks)] if ranks == 2 else [rank, *(r for r in range(ranks) if r != rank)]
        pieces = buffer.split([sizes[r] for r in order])
        messages = [pieces[order.index(r)] for r in range(ranks)]
        others = buffer[: sizes[0]] if (rank, ranks) == (1, 2) else buffer[sizes[rank] :]
        if self.coded is not None:
            torch.cat(self.coded.pack(places, gradients), out=messages[rank])
        else:
            bits = [rows.reshape(-1).view(torch.int32) for rows in gradients]
            in_order = [*places, *bits] if _places_first(rank) else [*bits, *places]
            torch.cat(in_order, out=messages[rank])
        sent = messages[rank]
        if not all_to_all:
            works = self._point_to_point(messages)
        else:
            sent = sent if ranks <= 2 else sent.repeat(ranks - 1)
            works = self._by_all_to_all(sent, others, sizes)
        return _InFlight(works, sent, messages, counts, dtype, self._settings())

    def _by_all_to_all(
        self, copies: torch.Tensor, others: torch.Tensor, sizes: list[int]
    ) -> list[dist.Work]:
        """Sends a copy to each other rank; gloo spends least time on this collective."""
        rank, ranks = self._pg.rank(), self._pg.size()
        if ranks == 1:
            return []
        receive = [0 if r == rank else size for r, size in enumerate(sizes)]
        send = [0 if r == rank else sizes[rank] for r in range(ranks)]
        return [
            dist.all_to_all_single(others, copies, receive, send, group=self._pg, async_op=True)
        ]

    def _point_to_point(self, messages: list[torch.Tensor]) -> list[dist.Work]:
        operations = []
        own = messages[self._pg.rank()]
        for other, message in enumerate(messages):
            if other != self._pg.rank():
                peer = dist.get_global_rank(self._pg, other)
                if own.numel():
                    operations.append(dist.P2POp(dist.isend, own, peer, self._pg))
                if message.numel():
                    operations.append(dist.P2POp(dist.irecv, message, peer, self._pg))
        return list(dist.batch_isend_irecv(operations)) if operations else []

    def _sparse(self, arrived: _InFlight) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Returns places and gradients of each bucket, rank after rank."""
        assert arrived.counts is not None
        if self.coded is not None:
            unpacked = [
                self.coded.unpack(message, row)
                for message, row in zip(arrived.messages, arrived.counts, strict=True)
            ]
            return [
                (
                    torch.cat([places[k] for places, _ in unpacked]),
                    torch.cat([rows[k] for _, rows in unpacked]).to(arrived.dtype),
                )
                for k in range(len(self._dims))
            ]
        buckets, messages = len(self._dims), arrived.messages
        words = [dim * arrived.dtype.itemsize // 4 for dim in self._dims]
        places, rows = [], []
        for rank, (message, row) in enumerate(zip(messages, arrived.counts, strict=True)):
            sizes = [n * word for n, word in zip(row, words, strict=True)]
            if _places_first(rank):
                pieces = message.split(row + sizes)
                places.append(pieces[:buckets])
                rows.append(pieces[buckets:])
            else:
                pieces = message.split(sizes + row)
                rows.append(pieces[:buckets])
                places.append(pieces[buckets:])
        return [
            (
                torch.cat([of_rank[k] for of_rank in places]),
                self._joined([of_rank[k] for of_rank in rows], k).view(arrived.dtype).view(-1, dim),
            )
            for k, dim in enumerate(self._dims)
        ]

    def _joined(self, pieces: list[torch.Tensor], bucket: int) -> torch.Tensor:
        """Joins pieces into one; those of two ranks and one bucket are one already."""
        if len(pieces) == 1:
            return pieces[0]
        if len(pieces) == 2 and len(self._dims) == 1:
            first, second = pieces
            return first.as_strided((first.numel() + second.numel(),), (1,))
        size = sum(piece.numel() for piece in pieces)
        out = self._buffers.take(f"hot rows {bucket}", (size,), pieces[0].dtype, pieces[0].device)
        return torch.cat(pieces, out=out)

    def _send_dense(
        self,
        places: Sequence[torch.Tensor],
        gradients: Sequence[torch.Tensor],
    ) -> _InFlight:
        """Sends a row for each place of every bucket, and how many ranks touched it."""
        elements = sum(replica.capacity * (replica.dim + 1) for replica in self._replicas)
        device = gradients[0].device
        flat = self._buffers.take("hot sums", (elements,), torch.float32, device).zero_()
        for (sums, touched), places_M, gradients_MD in zip(
            self._blocks(flat), places, gradients, strict=True
        ):
            sums.index_copy_(0, places_M.long(), gradients_MD.float())
            touched.index_fill_(0, places_M.long(), 1)
        works = []
        if self._pg.size() > 1:
            works.append(dist.all_reduce(flat, group=self._pg, async_op=True))
        return _InFlight(works, flat, [flat], None, gradients[0].dtype, self._settings())

    def _dense(self, arrived: _InFlight) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Returns the places that some rank touched, and their gradients."""
        return [
            _touched(sums, touched, arrived.dtype, replica)
            for (sums, touched), replica in zip(
                self._blocks(arrived.messages[0]), self._replicas, strict=True
            )
        ]

    def _blocks(self, flat: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Returns each bucket's [places, dim] and [places] of the flat buffer."""
        pieces = flat.split([n for r in self._replicas for n in (r.capacity * r.dim, r.capacity)])
        return [
            (pieces[2 * k].view(-1, replica.dim), pieces[2 * k + 1])
            for k, replica in enumerate(self._replicas)
        ]


def _places_first(rank: int) -> bool:
    """Returns whether places come before gradients in a rank's message, so that two ranks' meet."""
    return rank % 2 == 0


def _touched(
    sums: torch.Tensor, touched: torch.Tensor, dtype: torch.dtype, replica: Replica
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the places that some rank touched and their gradients.

    On CUDA all places, where that makes no difference: to find out which would be a host
    synchronisation.  Without weight decay and with some eps, a gradient of zero changes nothing.
    """
    if touched.device.type != "cpu" and not replica.kernel.table.zero_gradients_change_rows:
        return torch.arange(len(sums), dtype=torch.int32, device=sums.device), sums.to(dtype)
    places = touched.nonzero().flatten()
    return places.int(), sums.index_select(0, places).to(dtype)


class _Sums:
    """What a bucket's replica needs to go on alone for some steps."""

    def __init__(self, replica: Replica) -> None:
        self._replica = replica
        self.base = [tensor.clone() for tensor in replica.tensors]
        weights = replica.tensors[0]
        self.sum = torch.zeros(weights.shape, device=weights.device)
        self._is_touched = torch.zeros(len(weights), dtype=torch.bool, device=weights.device)

    def add(self, places_M: torch.Tensor, gradients_MD: torch.Tensor) -> None:
        self.sum.index_add_(0, places_M.long(), gradients_MD.to(self.sum.dtype))
        self._is_touched.index_fill_(0, places_M.long(), True)

    def touched(self) -> torch.Tensor:
        return self._is_touched.nonzero().flatten().int()

    def restore(self) -> None:
        """Undoes what this rank did alone."""
        places = self._is_touched.nonzero().flatten()
        for tensor, base in zip(self._replica.tensors, self.base, strict=True):
            tensor.index_copy_(0, places, base.index_select(0, places))
        self.sum.index_fill_(0, places, 0)
        self._is_touched.index_fill_(0, places, False)

    def reset(self) -> None:
        for tensor, base in zip(self._replica.tensors, self.base, strict=True):
            base.copy_(tensor)
        self.sum.zero_()
        self._is_touched.zero_()

    def keep(self, places: torch.Tensor) -> None:
        """Takes the rows as what all ranks have in common from here on."""
        for tensor, base in zip(self._replica.tensors, self.base, strict=True):
            base.index_copy_(0, places.long(), tensor.index_select(0, places))
