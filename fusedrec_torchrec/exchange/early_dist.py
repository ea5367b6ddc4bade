"""Rows of the next batch that are final already: sent while the current one is still computed.

When the ids of the next batch have arrived, owners know which rows it asks for, and which rows the
current batch, of whatever rank, is going to update.  What is asked for by the next batch alone has
the value already that it will be looked up with.  So it goes ahead:

1. every owner tells each requester which of its units come early: a bit for each, in ONE all-to-all
   whose sizes follow from the counts that both sides have;
2. the early rows travel in ONE all-to-all that nobody waits for before the next batch is pooled.

The rest is sent after the update, by the output dist, whose message is shorter by as many rows.
The lookup itself and all of backward are as they are without early rows, so the results are the
same to the last bit.

A bag that its owner pools is early if the current batch updates none of its rows.  Rows and bags
are late whose codec encodes them together with others, or not twice in the same way.

After BagPipe (SOSP 2023), which knows batches ahead, and FEC (IPDPS 2022).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist

from fusedrec_torchrec.codecs.wire import Wire
from fusedrec_torchrec.compat.bucket_table import BucketKernel
from fusedrec_torchrec.core.buffer_order import rank_major
from fusedrec_torchrec.core.buffers import Buffers
from fusedrec_torchrec.core.lost_rank import wait
from fusedrec_torchrec.core.stages import stage
from fusedrec_torchrec.exchange.asked import Asked
from fusedrec_torchrec.exchange.bit_masks import pack, sizes_of, unpack
from fusedrec_torchrec.exchange.context import FusedShardingContext, ReceivedRows
from fusedrec_torchrec.exchange.early_rows import EarlyRows, Split
from fusedrec_torchrec.exchange.row_changes import RowChanges

__all__ = ["EarlyCount", "EarlyDist", "Promise"]


@dataclass
class EarlyCount:
    """Counts rows that came from other ranks, of batches that could have early ones.

    Attributes:
        rows: all of them, one for each bag that its owner has pooled.
        early: those of them that came early.
    """

    rows: int = 0
    early: int = 0

    def reset(self) -> None:
        """Begins to count anew."""
        self.rows = self.early = 0


@dataclass
class Promise:
    """Says what this rank will send early for a batch, and waits to hear it from the others.

    Attributes:
        context: of the batch.
        sent: which of the units that this rank is asked for.
        asked: what these are, of each bucket that has early ones.
        since: how often rows have changed so far, see ``RowChanges``.
        bits: from all owners, as they come.
        work: on their way.
    """

    context: FusedShardingContext
    sent: Split
    asked: list[Asked]
    since: int
    bits: torch.Tensor
    work: dist.Work


class EarlyDist:
    """Sends early rows of a module's fused tables.

    Args:
        pg: the process group.
        kernels: the table of each bucket on this rank; None if all of its rows are late.
        dims: columns of each bucket's rows.
        wire: codecs of rows; None if they travel as they are.
        changes: notes what changes the rows.
    """

    def __init__(
        self,
        pg: dist.ProcessGroup,
        kernels: Sequence[BucketKernel | None],
        dims: Sequence[int],
        wire: Wire | None,
        changes: RowChanges,
    ) -> None:
        self._pg = pg
        self._dims = list(dims)
        self._kernels = list(kernels)
        self._early_buckets = [k for k, kernel in enumerate(kernels) if kernel is not None]
        self._wire = None if wire is None else wire.of_buckets(self._early_buckets)
        self._changes = changes
        self._buffers = Buffers()
        # Of each row, whether the current batch asks for it; false in between.
        self._is_asked_K = [
            torch.zeros(0 if kernel is None else kernel.table.rows, dtype=torch.bool)
            for kernel in kernels
        ]
        self.count = EarlyCount()

    def promise(self, current: ReceivedRows, coming: ReceivedRows) -> Promise | None:
        """Finds the rows that the coming batch can have already, and tells who asks for them.

        Args:
            current: what all ranks ask for now; backward has not updated it yet.
            coming: what they ask for next.

        Returns:
            None if no row can be early, which all ranks know.
        """
        context = coming.context
        if not _keeps_rows(current.context, context):
            return None
        with stage("early_rows"):
            asked_K = coming.asked()
            masks_K = [
                self._final(k, now, asked)
                for k, (now, asked) in enumerate(zip(current.asked(), asked_K, strict=True))
            ]
            early_U = rank_major(masks_K, context.counts_in)
            units_in = [sum(row) for row in context.counts_in]
            bytes_out = sizes_of([sum(row) for row in self._counts_out(context)])
            bits = torch.empty(sum(bytes_out), dtype=torch.uint8)
            own_bits = pack(early_U, units_in)
            work = dist.all_to_all_single(
                bits, own_bits, bytes_out, sizes_of(units_in), group=self._pg, async_op=True
            )
            self._changes.expect(current.context)
            return Promise(
                context,
                Split(early_U, context.counts_in, self._dims),
                [asked_K[k].only(masks_K[k]) for k in self._early_buckets],
                self._changes.count,
                bits,
                work,
            )

    def send(self, promise: Promise) -> None:
        """Sends the rows that were promised off; the batch knows of them from here on."""
        wait(promise.work, self._pg, "early rows")
        with stage("early_rows"):
            context, sent = promise.context, promise.sent
            counts_out = self._counts_out(context)
            early_U = unpack(promise.bits, [sum(row) for row in counts_out])
            received = Split(early_U, counts_out, self._dims)
            self._add(counts_out, received.early)
            counts_in, counts_from = self._of_buckets(sent.early), self._of_buckets(received.early)
            pieces = [
                self._look_up(k, asked).view(-1)
                for k, asked in zip(self._early_buckets, promise.asked, strict=True)
            ]
            flat = rank_major(pieces, self._elements(counts_in))
            total = sum(
                count * dim
                for row in counts_out
                for count, dim in zip(row, self._dims, strict=True)
            )
            room = self._buffers.take("early and late rows", (total,), flat.dtype, flat.device)
            from_ranks = [sum(row) for row in self._elements(counts_from)]
            to_ranks = [sum(row) for row in self._elements(counts_in)]
            arriving = early = room[: sum(from_ranks)]
            if self._wire is not None:
                flat, _ = self._wire.encode(flat, counts_in, training=False)
                from_ranks, to_ranks = self._wire.sizes(counts_from), self._wire.sizes(counts_in)
                arriving = self._buffers.take(
                    "early bytes", (sum(from_ranks),), torch.uint8, flat.device
                )
            work = dist.all_to_all_single(
                arriving, flat, from_ranks, to_ranks, group=self._pg, async_op=True
            )
            arrive = partial(self._arrive, work, arriving, counts_from, early)
            context.early = EarlyRows(sent, received, room, early.numel(), arrive, promise.since)

    def _arrive(
        self, work: dist.Work, arriving: torch.Tensor, counts: list[list[int]], out: torch.Tensor
    ) -> None:
        wait(work, self._pg, "early rows")
        if self._wire is not None:
            self._wire.decode(arriving, counts, out)

    def _final(self, bucket: int, now: Asked, coming: Asked) -> torch.Tensor:
        """Returns which units of the coming batch the current one leaves as they are."""
        if self._kernels[bucket] is None:
            return torch.zeros(coming.units, dtype=torch.bool)
        is_asked, rows_now = self._is_asked_K[bucket], now.rows_R.long()
        is_asked.index_fill_(0, rows_now, True)
        changes_R = is_asked.index_select(0, coming.rows_R)
        is_asked.index_fill_(0, rows_now, False)
        if coming.offsets_U1 is None:
            return ~changes_R
        so_far = torch.nn.functional.pad(changes_R.cumsum(0), (1, 0))
        return so_far.index_select(0, coming.offsets_U1).diff() == 0

    def _add(self, counts: list[list[int]], early: list[list[int]]) -> None:
        own = self._pg.rank()
        self.count.rows += sum(sum(row) for rank, row in enumerate(counts) if rank != own)
        self.count.early += sum(sum(row) for rank, row in enumerate(early) if rank != own)

    def _counts_out(self, context: FusedShardingContext) -> list[list[int]]:
        """Returns the units that this rank asks of each rank, replicas left out."""
        return context.counts_out[: self._pg.size()]

    def _of_buckets(self, counts: list[list[int]]) -> list[list[int]]:
        return [[row[k] for k in self._early_buckets] for row in counts]

    def _elements(self, counts: list[list[int]]) -> list[list[int]]:
        dims = [self._dims[k] for k in self._early_buckets]
        return [[n * dim for n, dim in zip(row, dims, strict=True)] for row in counts]

    @torch.no_grad()
    def _look_up(self, bucket: int, asked: Asked) -> torch.Tensor:
        kernel = self._kernels[bucket]
        assert kernel is not None
        return kernel(asked.rows_R, asked.offsets_U1, asked.weights_R)


def _keeps_rows(current: FusedShardingContext, coming: FusedShardingContext) -> bool:
    """Returns whether owners can know the rows of a batch before the one ahead of it is done.

    Rows that are no longer replicated come home with the first batch that asks for them there.
    """
    if coming.replicas is None or current.replicas is None:
        return True
    return coming.replicas.needs_owners and coming.replicas.routed_as(current.replicas)
