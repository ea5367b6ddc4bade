"""Which received row each id of a batch shows, for the sequences of all slots at once, on CUDA.

Rows are numbered over all buckets, which have the same number of columns: TorchRec's
EmbeddingCollection sees to that.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd import Function
from torchrec.streamable import Multistreamable

from fusedrec_torchrec.core.buffers import Buffers
from fusedrec_torchrec.core.stages import stage
from fusedrec_torchrec.exchange.flat_rows import FlatRows, TakeScale
from fusedrec_torchrec.exchange.gradients import first_order

__all__ = ["SlotSequences", "gather"]


@dataclass
class SlotSequences(Multistreamable):
    """The ids of all slots of a batch.

    Attributes:
        rows_N: the row of each id among those of all buckets; until the host knows how many ids
            there are, maybe with others behind them.
    """

    rows_N: torch.Tensor

    def record_stream(self, stream: torch.Stream) -> None:
        self.rows_N.record_stream(stream)


def gather(
    flat: torch.Tensor,
    rows: FlatRows,
    sequences: SlotSequences,
    buffers: Buffers,
    take_scale: TakeScale,
) -> torch.Tensor:
    """Returns the row of each id.

    Args:
        flat: the unique rows received, in the order (owner, bucket).
        rows: where they lie.
        sequences: which of them each id shows.
        buffers: where results get their memory.
        take_scale: see ``pooling.pool``.
    """
    gathered: torch.Tensor = _Gather.apply(flat, rows, sequences.rows_N, buffers, take_scale)
    return gathered


class _Gather(Function):
    @staticmethod
    def forward(
        ctx: Any,
        flat: torch.Tensor,
        rows: FlatRows,
        rows_N: torch.Tensor,
        buffers: Buffers,
        take_scale: TakeScale,
    ) -> torch.Tensor:
        ctx.rows, ctx.rows_N, ctx.buffers, ctx.take_scale = rows, rows_N, buffers, take_scale
        ctx.dtype, dim = flat.dtype, rows.dims[0]
        with stage("pooling"):
            out_ND = buffers.take("output", (rows_N.numel(), dim), flat.dtype, flat.device)
            torch.ops.fusedrec.bag_sums(
                flat, rows.of_all, dim, rows_N, None, None, None, 1, 0, out_ND
            )
            return out_ND

    @staticmethod
    @first_order
    def backward(ctx: Any, gradient_ND: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        rows, dim = ctx.rows, ctx.rows.dims[0]
        with stage("backward_pooling"):
            if gradient_ND.stride(1) != 1:  # as an expanded one
                gradient_ND = gradient_ND.contiguous()
            sums = ctx.buffers.take(
                "row gradients", (rows.elements,), torch.float32, gradient_ND.device
            ).zero_()
            scale = ctx.take_scale()
            torch.ops.fusedrec.row_sums(
                gradient_ND, 1, 0, ctx.rows_N, None, None, None,
                rows.of_all, sum(rows.rows), dim, scale, sums,
            )  # fmt: skip
            return sums.to(ctx.dtype), None, None, None, None
