"""Received rows to output, and output gradients back to one gradient per unique row.

Forward gathers rows by bag and sums them; backward is the transposed sum, so both run on the
same kernel: ``embedding_bag`` over rows forward, and over output gradients, with ids sorted by
row, backward.  Gradients are thereby summed per unique row on the requester before they travel.
"""

from typing import Any

import torch
from torch.autograd import Function

from fusedrec_torchrec.exchange.bags import Bags

__all__ = ["pool"]


def _bag_sums(
    rows: torch.Tensor,
    indices: torch.Tensor,
    offsets: torch.Tensor | None,
    weights: torch.Tensor | None,
) -> torch.Tensor:
    """Weighted sums of ``rows[indices]`` over each bag; float32 arithmetic."""
    if offsets is None and weights is None:
        return rows.index_select(0, indices)
    if offsets is None:
        offsets = torch.arange(indices.numel() + 1, dtype=indices.dtype, device=indices.device)
    if rows.size(0) == 0:  # no rows at all, so all bags are empty
        return rows.new_zeros(offsets.numel() - 1, rows.size(1))
    sums = torch.embedding_bag(
        rows.float(),
        indices,
        offsets.to(indices.dtype),
        scale_grad_by_freq=False,
        mode=0,  # sum
        sparse=False,
        per_sample_weights=None if weights is None else weights.float(),
        include_last_offset=True,
    )[0]
    return sums.to(rows.dtype)


class _Pool(Function):
    """Sums of rows by bag, divided by the bag's divisor."""

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, rows_UD: torch.Tensor, weights_N: torch.Tensor | None, bags: Bags
    ) -> torch.Tensor:
        out_BD = _bag_sums(rows_UD, bags.rows_N, bags.offsets_B1, weights_N)
        if bags.divisor_B1 is not None:
            out_BD = out_BD.div_(bags.divisor_B1)
        ctx.bags = bags
        ctx.num_rows = rows_UD.size(0)
        weights_need_grad = weights_N is not None and ctx.needs_input_grad[1]
        ctx.save_for_backward(weights_N, rows_UD if weights_need_grad else None)
        return out_BD

    @staticmethod
    def backward(  # type: ignore[override]
        ctx: Any, grad_BD: torch.Tensor
    ) -> tuple[torch.Tensor | None, torch.Tensor | None, None]:
        bags: Bags = ctx.bags
        weights_N, rows_UD = ctx.saved_tensors
        if bags.divisor_B1 is not None:
            grad_BD = grad_BD / bags.divisor_B1
        bag_N = bags.bag_of_id()

        grad_rows = None
        if ctx.needs_input_grad[0]:
            sorted_N, order_N = torch.sort(bags.rows_N, stable=True)
            row_bounds = torch.searchsorted(
                sorted_N,
                torch.arange(ctx.num_rows + 1, dtype=sorted_N.dtype, device=sorted_N.device),
                out_int32=True,
            )
            grad_rows = _bag_sums(
                grad_BD,
                order_N.int() if bag_N is None else bag_N.index_select(0, order_N),
                row_bounds,
                None if weights_N is None else weights_N.index_select(0, order_N),
            )
        grad_weights = None
        if rows_UD is not None:
            grad_of_id = grad_BD if bag_N is None else grad_BD.index_select(0, bag_N)
            grad_weights = torch.linalg.vecdot(
                grad_of_id.float(), rows_UD.index_select(0, bags.rows_N).float()
            ).to(weights_N.dtype)
        return grad_rows, grad_weights, None


def pool(rows_UD: torch.Tensor, weights_N: torch.Tensor | None, bags: Bags) -> torch.Tensor:
    """Pools the rows of one bucket.

    Args:
        rows_UD: the unique rows received for the bucket.
        weights_N: a weight per id in the order of the batch, or None.
        bags: which rows form which output row.

    Returns:
        [batch, slots * D] if the bags lie side by side, else [bags, D].
    """
    if weights_N is not None and bags.order_N is not None:
        weights_N = weights_N.index_select(0, bags.order_N)
    out_BD = _Pool.apply(rows_UD, weights_N, bags)
    return out_BD.view(-1, bags.width * rows_UD.size(1)) if bags.width else out_BD
