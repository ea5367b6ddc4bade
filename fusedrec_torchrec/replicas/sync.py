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
from typing import NamedTuple

import torch
import torch.distributed as dist
from torchrec.distributed.comm_ops import get_gradient_division

from fusedrec_torchrec.codecs.options import CodecOptions
from fusedrec_torchrec.compat.bucket_table import OptimizerSettings
from fusedrec_torchrec.core import operators
from fusedrec_torchrec.core.buffers import Buffers
from fusedrec_torchrec.core.lost_rank import wait, waiting
from fusedrec_torchrec.core.transfer import to_host
from fusedrec_torchrec.replicas.alone import StepsAlone
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
        buffer: of all messages.
        counts: [rank][bucket] of the places; None if dense.
        dtype: that FBGEMM wants gradients in.
        settings: of each bucket's optimizer, as they were when the gradients were sent.
    """

    works: list[dist.Work]
    sent: torch.Tensor
    messages: list[torch.Tensor]
    buffer: torch.Tensor
    counts: list[list[int]] | None
    dtype: torch.dtype
    settings: list[OptimizerSettings]


class _Update(NamedTuple):
    """Gradients of the places of a bucket.

    Attributes:
        places: of the replica.
        gradients: a row for each of them.
        are_distinct: whether each place comes once, see ``Replica.update_distinct``.
    """

    places: torch.Tensor
    gradients: torch.Tensor
    are_distinct: bool


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
        self._sums = [StepsAlone(replica) for replica in replicas] if every > 1 else []
        self._steps = 0  # since the last sync

    def reconciled(self, k: int) -> list[torch.Tensor]:
        """Returns a bucket's rows as they were after the last sync, the same on all ranks."""
        return self._sums[k].reconciled() if self._sums else self._replicas[k].tensors

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
                own_MD = gradients_MD * factor
                if replica.updates_distinct:
                    replica.update_distinct(places_M.long(), own_MD.float(), replica.settings())
                else:
                    replica.update(places_M, own_MD, replica.settings())

    def reconcile(self, dtype: torch.dtype = torch.float32) -> None:
        """Starts a sync of what has not been synced yet; all ranks must come here together."""
        if not self._steps:
            return
        self._steps = 0
        counts = self._everywhere([sums.count() for sums in self._sums])
        places = [
            sums.touched(count)
            for sums, count in zip(self._sums, counts[self._pg.rank()], strict=True)
        ]
        gradients = [
            sums.sum.index_select(0, places_M).to(dtype)
            for sums, places_M in zip(self._sums, places, strict=True)
        ]
        self._send(places, gradients, counts, all_to_all=False)

    def _everywhere(self, counts: Sequence[torch.Tensor]) -> list[list[int]]:
        """Returns what all ranks have counted."""
        own = torch.cat(list(counts)) if len(counts) > 1 else counts[0]
        gathered = own.new_empty(self._pg.size() * own.numel())
        with waiting(self._pg, self._stage):
            dist.all_gather_single(gathered, own, group=self._pg)
        numbers, size = to_host(gathered), own.numel()
        return [numbers[i : i + size] for i in range(0, len(numbers), size)]

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
        for k, (places, gradients, are_distinct) in enumerate(updates):
            replica, settings = self._replicas[k], arrived.settings[k]
            if places.numel() and are_distinct:
                replica.update_distinct(places, gradients, settings)
            elif places.numel():
                replica.update(places, gradients, settings)
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
        return _InFlight(works, sent, messages, buffer, counts, dtype, self._settings())

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

    def _sparse(self, arrived: _InFlight) -> list[_Update]:
        """Returns places and gradients of each bucket, rank after rank."""
        assert arrived.counts is not None
        if self.coded is not None:
            places, rows, bases = self.coded.unpack(arrived.messages, arrived.counts)
        else:
            places, rows = self._pieces(arrived.messages, arrived.counts, arrived.dtype)
            bases = [arrived.buffer.view(arrived.dtype)] * len(self._dims)
        updates = []
        for k, replica in enumerate(self._replicas):
            of_ranks, rows_of_ranks = [p[k] for p in places], [r[k] for r in rows]
            if replica.updates_distinct and operators.available_on(
                arrived.buffer.device, "sum_replicas"
            ):
                summed = torch.ops.fusedrec.sum_replicas(
                    arrived.buffer,
                    _starts(of_ranks, arrived.buffer),
                    [of_rank.numel() for of_rank in of_ranks],
                    bases[k],
                    _starts(rows_of_ranks, bases[k]),
                    replica.dim,
                    replica.capacity,
                )
                updates.append(_Update(summed[0], summed[1], are_distinct=True))
                continue
            joined = bases[k] if self.coded is not None else self._joined(rows_of_ranks, k)
            gradients = joined.to(arrived.dtype).view(-1, replica.dim)
            updates.append(_Update(torch.cat(of_ranks), gradients, False))
        return updates

    def _pieces(
        self, messages: Sequence[torch.Tensor], counts: Sequence[list[int]], dtype: torch.dtype
    ) -> tuple[list[Sequence[torch.Tensor]], list[list[torch.Tensor]]]:
        """Returns places and gradients, [rank][bucket] each, as they are in the messages."""
        buckets, places, rows = len(self._dims), [], []
        words = [dim * dtype.itemsize // 4 for dim in self._dims]
        for rank, (message, row) in enumerate(zip(messages, counts, strict=True)):
            sizes = [n * word for n, word in zip(row, words, strict=True)]
            if _places_first(rank):
                pieces = message.split(row + sizes)
                of_rank, bits = pieces[:buckets], pieces[buckets:]
            else:
                pieces = message.split(sizes + row)
                bits, of_rank = pieces[:buckets], pieces[buckets:]
            places.append(of_rank)
            rows.append([piece.view(dtype) for piece in bits])
        return places, rows

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
        return _InFlight(works, flat, [flat], flat, None, gradients[0].dtype, self._settings())

    def _dense(self, arrived: _InFlight) -> list[_Update]:
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


def _starts(pieces: Sequence[torch.Tensor], whole: torch.Tensor) -> list[int]:
    """Returns where in a tensor each of its pieces begins."""
    return [int(piece.storage_offset() - whole.storage_offset()) for piece in pieces]


def _touched(
    sums: torch.Tensor, touched: torch.Tensor, dtype: torch.dtype, replica: Replica
) -> _Update:
    """Returns the places that some rank touched and their gradients.

    On CUDA all places, where that makes no difference: to find out which would be a host
    synchronisation.  Without weight decay and with some eps, a gradient of zero changes nothing.
    """
    kind = torch.int64 if replica.updates_distinct else torch.int32
    dtype = torch.float32 if replica.updates_distinct else dtype
    if touched.device.type != "cpu" and not replica.kernel.table.zero_gradients_change_rows:
        places = torch.arange(len(sums), dtype=kind, device=sums.device)
        return _Update(places, sums.to(dtype), replica.updates_distinct)
    places = touched.nonzero().flatten()
    gradients = sums.index_select(0, places).to(dtype)
    return _Update(places.to(kind), gradients, replica.updates_distinct)
