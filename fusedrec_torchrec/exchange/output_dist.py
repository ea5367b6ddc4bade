"""The output dist: ONE all-to-all of rows to their requesters, ONE of gradients back, pooling.

Rows of all buckets travel flattened in the same buffer.  Like TorchRec's own collectives it is
cut in two autograd nodes, so that forward and backward both launch the all-to-all in one node
and wait for it in the other, with whatever else is ready running in between.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch.autograd import Function
from torchrec.distributed.comm_ops import get_gradient_division
from torchrec.distributed.embedding_sharding import BaseEmbeddingDist
from torchrec.distributed.types import Awaitable, LazyAwaitable

from fusedrec_torchrec.codecs.codec import Entries
from fusedrec_torchrec.codecs.wire import Wire
from fusedrec_torchrec.core.buffers import Buffers
from fusedrec_torchrec.core.lost_rank import wait
from fusedrec_torchrec.core.stages import stage
from fusedrec_torchrec.core.transfer import used_on_this_stream
from fusedrec_torchrec.exchange.context import FusedShardingContext
from fusedrec_torchrec.exchange.flat_rows import FlatRows
from fusedrec_torchrec.exchange.pooling import pool
from fusedrec_torchrec.exchange.replication import BatchReplicas
from fusedrec_torchrec.exchange.row_changes import RowChanges
from fusedrec_torchrec.exchange.slot_sequences import SlotSequences, gather

__all__ = ["FusedOutputDist"]


class _RowExchange:
    """One batch's all-to-all of rows and, backward, of gradients.

    Replicated rows join the received ones at the end of the buffer, and their gradients leave from
    there.  Rows that have travelled early are not sent again; gradients of all rows are.

    Args:
        pg: the process group.
        buffers: where results get their memory.
        dims: columns of each bucket's rows.
        context: of the batch.
        wires: codecs of rows and of gradients; None if they travel as they are.
        changes: notes that gradients are about to change rows.
    """

    def __init__(
        self,
        pg: dist.ProcessGroup,
        buffers: Buffers,
        dims: list[int],
        context: FusedShardingContext,
        wires: tuple[Wire, Wire] | None,
        changes: RowChanges,
    ) -> None:
        def elements(counts: list[list[int]]) -> list[int]:
            return [sum(n * dim for n, dim in zip(row, dims, strict=True)) for row in counts]

        self._pg = pg
        self._buffers = buffers
        self._elements = elements
        self._batch = context
        self._changes = changes
        self.waits_later = context.late_gradients is not None
        self._early, context.early = context.early, None
        self._counts_out = context.counts_out[: pg.size()]
        self._counts_in = context.counts_in
        received = elements(context.counts_out)
        self._sent = elements(context.counts_in)
        self._received = received[: pg.size()]
        self._replica_elements = sum(received[pg.size() :])
        self._replicas: BatchReplicas | None = context.replicas
        self._wires = wires
        self._work: dist.Work | None = None
        self._result: torch.Tensor | None = None
        self._in_flight: torch.Tensor | None = None
        self._arriving: torch.Tensor | None = None  # bytes, still to be decoded
        self._entries_sent: list[Entries | None] | None = None
        self._entries_received: list[Entries | None] | None = None
        self._scale_is_taken = self._has_gradients = False

    def take_scale(self) -> float:
        """Returns what gradients are to be multiplied with; whoever calls this does it.

        TorchRec divides gradients by the number of ranks.  If that is no power of two, the product
        is not the quotient to the last bit, and the division stays here.
        """
        if not get_gradient_division() or self._pg.size() & (self._pg.size() - 1):
            return 1.0
        self._scale_is_taken = True
        return 1.0 / self._pg.size()

    def send_rows(self, flat: torch.Tensor, training: bool) -> torch.Tensor:
        rows = sum(self._received)
        result = self._buffers.take(
            "received rows", (rows + self._replica_elements,), flat.dtype, flat.device
        )
        with stage("rows"):
            if self._early is not None:
                flat = self._early.sent.late_of(flat)
            receive, send = self._travelling
            if self._wires is None:
                into = self._room(result)
                self._start(flat, into, self._elements(receive), self._elements(send))
            elif self._talks:
                encoded, self._entries_sent = self._wires[0].encode(flat, send, training)
                self._start_bytes(self._wires[0], encoded, receive, send)
        if self._replicas is not None:
            self._replicas.look_up(result[rows:])
        self._result = result
        return result

    def send_gradients(self, flat: torch.Tensor) -> None:
        rows = sum(self._received)
        with stage("gradients"):
            # Divided before they travel, whoever does it: ranks may differ in who does.
            if get_gradient_division() and not self._scale_is_taken:
                flat = flat / self._pg.size()
            self._scale_is_taken = False
            flat = flat.contiguous()
            result = self._buffers.take(
                "received gradients", (sum(self._sent),), flat.dtype, flat.device
            )
            if self._wires is None:
                self._start(flat[:rows], result, self._sent, self._received)
            elif self._talks:
                encoded, _ = self._wires[1].encode(
                    flat[:rows], self._counts_out, True, self._entries_received
                )
                self._start_bytes(self._wires[1], encoded, self._counts_in, self._counts_out)
        if self._replicas is not None:
            self._replicas.send_gradients(flat[rows:])
        self._result, self._has_gradients = result, True

    @property
    def _travelling(self) -> tuple[list[list[int]], list[list[int]]]:
        """Returns the units of each rank and bucket whose rows come, and those whose rows go."""
        if self._early is None:
            return self._counts_out, self._counts_in
        return self._early.received.late, self._early.sent.late

    def _room(self, result: torch.Tensor) -> torch.Tensor:
        """Returns where the rows that come are to be written, of those that there will be."""
        if self._early is None:
            return result[: sum(self._received)]
        return self._early.room_for_late

    @property
    def _talks(self) -> bool:
        """Returns whether any rank needs rows of another; all ranks know."""
        return self._replicas is None or self._replicas.needs_owners

    def _start_bytes(
        self,
        wire: Wire,
        encoded: torch.Tensor,
        receive: list[list[int]],
        send: list[list[int]],
    ) -> None:
        sizes = wire.sizes(receive)
        self._arriving = self._buffers.take(
            "arriving bytes", (sum(sizes),), torch.uint8, encoded.device
        )
        self._start(encoded, self._arriving, sizes, wire.sizes(send))

    def _start(
        self, flat: torch.Tensor, result: torch.Tensor, receive: list[int], send: list[int]
    ) -> None:
        if not self._talks:
            return
        self._in_flight = flat.contiguous()
        self._work = dist.all_to_all_single(
            result, self._in_flight, receive, send, group=self._pg, async_op=True
        )

    def finish(self, what: str) -> torch.Tensor:
        assert self._result is not None
        if self._work is not None:
            wait(self._work, self._pg, what)
        result, arrived = self._result, self._arriving
        # A pipeline may have sent on another stream, whose memory these are.
        used_on_this_stream(result, arrived, self._in_flight)
        self._work = self._result = self._in_flight = self._arriving = None
        if arrived is not None:
            assert self._wires is not None
            if what == "rows":
                receive, _ = self._travelling
                into = self._room(result)
                self._entries_received = self._wires[0].decode(arrived, receive, into)
            else:
                self._wires[1].decode(arrived, self._counts_in, result, self._entries_sent)
        if what == "rows" and self._early is not None:
            self._early.join(result[: sum(self._received)])
            self._early = None
        return result

    def finish_gradients(self) -> torch.Tensor | None:
        """Waits for gradients, and tells that rows are about to be updated by them.

        Returns:
            None if there are none, as nobody has sent any.
        """
        if not self._has_gradients:
            return None
        with stage("gradients"):
            gradients = self.finish("gradients")
        self._changes.update(self._batch)
        return gradients


class _Launch(Function):
    """Forward: start sending rows.  Backward: finish receiving gradients."""

    @staticmethod
    def forward(ctx: Any, flat: torch.Tensor, exchange: _RowExchange) -> torch.Tensor:
        ctx.exchange = exchange
        return exchange.send_rows(flat, training=ctx.needs_input_grad[0])

    @staticmethod
    def backward(ctx: Any, _: torch.Tensor) -> tuple[torch.Tensor | None, None]:
        if ctx.exchange.waits_later:
            return None, None
        return ctx.exchange.finish_gradients(), None


class _Wait(Function):
    """Forward: finish receiving rows.  Backward: start sending gradients."""

    @staticmethod
    def forward(ctx: Any, launched: torch.Tensor, exchange: _RowExchange) -> torch.Tensor:
        ctx.exchange = exchange
        with stage("rows"):
            return exchange.finish("rows").view_as(launched)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        ctx.exchange.send_gradients(grad)
        return grad, None  # only tells autograd that there is a gradient; _Launch has the real one


class FusedOutputDist(BaseEmbeddingDist[FusedShardingContext, torch.Tensor, torch.Tensor]):
    """Owner's rows to the requester's output.

    Args:
        pg: the process group.
        dims: columns of each bucket's rows.
        wires: codecs of rows and of gradients; None if they travel as they are.
        changes: notes what changes the rows; if None, nobody asks.
    """

    def __init__(
        self,
        pg: dist.ProcessGroup,
        dims: list[int],
        wires: tuple[Wire, Wire] | None = None,
        changes: RowChanges | None = None,
    ) -> None:
        super().__init__()
        self._pg = pg
        self.wires = wires
        self._changes = changes or RowChanges()
        self._dims = dims
        self._row_buffers = Buffers()

    def forward(
        self, local_embs: torch.Tensor, sharding_ctx: FusedShardingContext | None = None
    ) -> Awaitable[torch.Tensor]:
        assert sharding_ctx is not None
        return PooledRowsAwaitable(
            self._dims,
            self._row_buffers,
            local_embs.view(-1),
            sharding_ctx,
            _RowExchange(
                self._pg, self._row_buffers, self._dims, sharding_ctx, self.wires, self._changes
            ),
        )


class PooledRowsAwaitable(LazyAwaitable[torch.Tensor]):
    """The output of one module's fused tables."""

    def __init__(
        self,
        dims: list[int],
        buffers: Buffers,
        flat_rows: torch.Tensor,
        context: FusedShardingContext,
        exchange: _RowExchange,
    ) -> None:
        super().__init__()
        self._dims = dims
        self._buffers = buffers
        self._context = context
        self._exchange = exchange
        if context.late_gradients is not None and flat_rows.requires_grad:
            flat_rows = context.late_gradients.cut(flat_rows, exchange.finish_gradients)
        self._launched = _Launch.apply(flat_rows, self._exchange)
        self._output: torch.Tensor | None = None

    def _wait_impl(self) -> torch.Tensor:
        if self._output is None:  # waiting twice is allowed, receiving twice is not
            self._output = self._receive_and_pool()
        return self._output

    def _receive_and_pool(self) -> torch.Tensor:
        context = self._context
        flat = _Wait.apply(self._launched, self._exchange)
        slot_bags, take_scale = context.slot_bags, self._exchange.take_scale
        if isinstance(slot_bags, SlotSequences):
            rows = FlatRows(context.counts_out, self._dims, flat.device)
            return gather(flat, rows, slot_bags, self._buffers, take_scale)
        weights: list[torch.Tensor | None] = [None] * len(context.bags)
        if context.weights_N is not None and slot_bags is None:
            own = context.weights_N.split(context.ids_per_bucket)
            weights[: len(own)] = own  # those of bags that owners pool have gone there
        output = pool(
            flat,
            context.counts_out,
            self._dims,
            weights,
            context.bags,
            self._buffers,
            take_scale,
            slot_bags,
            None if slot_bags is None else context.weights_N,
        )
        return output.flatten() if context.variable_batch_per_feature else output
