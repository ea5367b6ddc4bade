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

from fusedrec_torchrec.exchange.buffers import Buffers
from fusedrec_torchrec.exchange.context import FusedShardingContext
from fusedrec_torchrec.exchange.layout import ExchangeLayout
from fusedrec_torchrec.exchange.pooling import pool
from fusedrec_torchrec.exchange.stages import stage
from fusedrec_torchrec.hot.batch import HotBatch
from fusedrec_torchrec.lost_rank import wait

__all__ = ["FusedOutputDist"]


class _RowExchange:
    """One batch's all-to-all of rows and, backward, of gradients.

    Hot rows join the received ones at the end of the buffer, and their gradients leave from there.

    Args:
        pg: the process group.
        buffers: where results get their memory.
        sent: elements that each rank is sent.
        received: elements that each rank sends.
        hot_elements: of the hot rows.
        hot: the hot rows; None if there are none.
    """

    def __init__(
        self,
        pg: dist.ProcessGroup,
        buffers: Buffers,
        sent: list[int],
        received: list[int],
        hot_elements: int = 0,
        hot: HotBatch | None = None,
    ) -> None:
        self._pg = pg
        self._buffers = buffers
        self._sent = sent
        self._received = received
        self._hot_elements = hot_elements
        self._hot = hot
        self._work: dist.Work | None = None
        self._result: torch.Tensor | None = None
        self._in_flight: torch.Tensor | None = None
        self._scale_is_taken = False

    def take_scale(self) -> float:
        """What gradients are to be multiplied with; whoever calls this does it.

        TorchRec divides gradients by the number of ranks.  If that is no power of two, the product
        is not the quotient to the last bit, and the division stays here.
        """
        if not get_gradient_division() or self._pg.size() & (self._pg.size() - 1):
            return 1.0
        self._scale_is_taken = True
        return 1.0 / self._pg.size()

    def send_rows(self, flat: torch.Tensor) -> torch.Tensor:
        rows = sum(self._received)
        result = self._buffers.take(
            "received rows", (rows + self._hot_elements,), flat.dtype, flat.device
        )
        with stage("rows"):
            self._start(flat, result[:rows], self._received, self._sent)
        if self._hot is not None:
            self._hot.look_up(result[rows:])
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
            self._start(flat[:rows], result, self._sent, self._received)
        if self._hot is not None:
            self._hot.send_gradients(flat[rows:])
        self._result = result

    def _start(
        self, flat: torch.Tensor, result: torch.Tensor, receive: list[int], send: list[int]
    ) -> None:
        if self._hot is not None and not self._hot.needs_owners:
            return  # on no rank
        self._in_flight = flat.contiguous()
        self._work = dist.all_to_all_single(
            result, self._in_flight, receive, send, group=self._pg, async_op=True
        )

    def finish(self, what: str) -> torch.Tensor:
        assert self._result is not None
        if self._work is not None:
            wait(self._work, self._pg, what)
        result = self._result
        self._work = self._result = self._in_flight = None
        return result


class _Launch(Function):
    """Forward: start sending rows.  Backward: finish receiving gradients."""

    @staticmethod
    def forward(ctx: Any, flat: torch.Tensor, exchange: _RowExchange) -> torch.Tensor:  # type: ignore[override]
        ctx.exchange = exchange
        return exchange.send_rows(flat)

    @staticmethod
    def backward(ctx: Any, _: torch.Tensor) -> tuple[torch.Tensor, None]:  # type: ignore[override]
        with stage("gradients"):
            return ctx.exchange.finish("gradients"), None


class _Wait(Function):
    """Forward: finish receiving rows.  Backward: start sending gradients."""

    @staticmethod
    def forward(ctx: Any, launched: torch.Tensor, exchange: _RowExchange) -> torch.Tensor:  # type: ignore[override]
        ctx.exchange = exchange
        with stage("rows"):
            return exchange.finish("rows").view_as(launched)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:  # type: ignore[override]
        ctx.exchange.send_gradients(grad)
        return grad, None  # only tells autograd that there is a gradient; _Launch has the real one


class FusedOutputDist(BaseEmbeddingDist[FusedShardingContext, torch.Tensor, torch.Tensor]):
    """Owner's rows to the requester's output."""

    def __init__(self, pg: dist.ProcessGroup, layout: ExchangeLayout) -> None:
        super().__init__()
        self._pg = pg
        self._dims = [bucket.dim for bucket in layout.buckets]
        self._buffers = Buffers()

    def forward(
        self, local_embs: torch.Tensor, sharding_ctx: FusedShardingContext | None = None
    ) -> Awaitable[torch.Tensor]:
        assert sharding_ctx is not None
        return PooledRowsAwaitable(
            self._pg, self._dims, self._buffers, local_embs.view(-1), sharding_ctx
        )


class PooledRowsAwaitable(LazyAwaitable[torch.Tensor]):
    """The output of one module's fused tables."""

    def __init__(
        self,
        pg: dist.ProcessGroup,
        dims: list[int],
        buffers: Buffers,
        flat_rows: torch.Tensor,
        context: FusedShardingContext,
    ) -> None:
        super().__init__()

        def elements(counts: list[list[int]]) -> list[int]:
            return [sum(n * dim for n, dim in zip(row, dims, strict=True)) for row in counts]

        self._dims = dims
        self._buffers = buffers
        self._context = context
        received = elements(context.counts_out)
        self._exchange = _RowExchange(
            pg,
            buffers,
            sent=elements(context.counts_in),
            received=received[: pg.size()],
            hot_elements=sum(received[pg.size() :]),
            hot=context.hot,
        )
        self._launched = _Launch.apply(flat_rows, self._exchange)
        self._output: torch.Tensor | None = None

    def _wait_impl(self) -> torch.Tensor:
        if self._output is None:  # waiting twice is allowed, receiving twice is not
            self._output = self._receive_and_pool()
        return self._output

    def _receive_and_pool(self) -> torch.Tensor:
        context = self._context
        flat = _Wait.apply(self._launched, self._exchange)
        weights = (
            [None] * len(self._dims)
            if context.weights_N is None
            else list(context.weights_N.split(context.ids_per_bucket))
        )
        output = pool(
            flat,
            context.counts_out,
            self._dims,
            weights,
            context.bags,
            self._buffers,
            self._exchange.take_scale,
        )
        return output.flatten() if context.variable_batch_per_feature else output
