"""Received rows to output, and output gradients back to one gradient per unique row.

Forward gathers rows by bag and sums them; backward is the transposed sum: gradients are summed
per unique row on the requester before they travel.  Bags that owners have pooled are rows here, one
for each; distinct bags that this rank pools are pooled once and copied.

Both are operators of our own, in C++ and of Triton kernels, from the buffer that came over the wire
straight into the output's columns and back, for all buckets; on CUDA those of all slots of a batch
are one launch (``slot_bags``).  Without them each bucket's rows are
brought together, and both directions run on ``embedding_bag``: over rows forward, and over
output gradients, with ids grouped by row, backward.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch.autograd import Function

from fusedrec_torchrec.core import operators
from fusedrec_torchrec.core.buffer_order import bucket_major
from fusedrec_torchrec.core.buffers import Buffers
from fusedrec_torchrec.core.stages import stage
from fusedrec_torchrec.exchange.bags import Bags
from fusedrec_torchrec.exchange.dedup import Occurrences
from fusedrec_torchrec.exchange.flat_rows import FlatRows, TakeScale
from fusedrec_torchrec.exchange.gradients import first_order
from fusedrec_torchrec.exchange.slot_bags import SlotBags

__all__ = ["pool"]

# Places of the weights among the arguments of ``_FlatPool``.
SLOT_WEIGHTS, WEIGHTS = 6, 7


def pool(
    flat: torch.Tensor,
    counts: list[list[int]],
    dims: Sequence[int],
    weights: Sequence[torch.Tensor | None],
    bags: Sequence[Bags],
    buffers: Buffers,
    take_scale: TakeScale = lambda: 1.0,
    slot_bags: SlotBags | None = None,
    slot_weights: torch.Tensor | None = None,
) -> torch.Tensor:
    """Pools the rows of all buckets.

    Args:
        flat: the unique rows received, in the order (owner, bucket).
        counts: [owner][bucket] how many they are.
        dims: columns of each bucket's rows.
        weights: for each of ``bags`` a weight per id in the order of the batch, or None.
        bags: for each bucket, or those behind the ones of ``slot_bags``, which rows form which
            output row.
        buffers: where results get their memory.
        take_scale: called in backward if rows' gradients can be scaled on the way; gives a power
            of two, and leaves it to us.
        slot_bags: which rows of the first buckets form which output row, if they have no ``bags``.
        slot_weights: a weight for each id of these; None if all count once.

    Returns:
        [batch, columns of all slots] if bags lie side by side.  Else the bags of all buckets one
        after another: [bags, D] if all buckets have the same D, flattened if not.
    """
    weights = [
        None if weight_N is None else of_bucket.in_bag_order(weight_N)
        for weight_N, of_bucket in zip(weights, bags, strict=True)
    ]
    outputs_of = [of_bucket.output for of_bucket in bags]
    side_by_side = _side_by_side(slot_bags, outputs_of)
    has_type = flat.is_cuda or flat.dtype == torch.float32
    has_operators = has_type and operators.available_on(flat.device, "bag_sums", "row_sums")
    if has_operators or slot_bags is not None:
        rows = FlatRows(counts, dims, flat.device)
        out: torch.Tensor = _FlatPool.apply(
            flat, rows, slot_bags, bags, buffers, take_scale, slot_weights, *weights
        )
    else:
        sizes = [[n * dim for n, dim in zip(row, dims, strict=True)] for row in counts]
        outputs = [
            _pool(rows.view(-1, dim), weight_N, of_bucket, buffers)
            for rows, dim, weight_N, of_bucket in zip(
                bucket_major(flat, sizes), dims, weights, bags, strict=True
            )
        ]
        outputs = [
            output if of_bucket.copies is None else _pool(output, None, of_bucket.copies, buffers)
            for output, of_bucket in zip(outputs, bags, strict=True)
        ]
        if side_by_side:
            outputs = [
                output.view(-1, of_bucket.width * dim)
                for output, dim, of_bucket in zip(outputs, dims, outputs_of, strict=True)
            ]
            return outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=1)
        out = torch.cat([output.flatten() for output in outputs])
    if not side_by_side and len(set(dims)) == 1:
        return out.view(-1, dims[0])
    return out


def _pool(
    rows_UD: torch.Tensor, weights_N: torch.Tensor | None, bags: Bags, buffers: Buffers
) -> torch.Tensor:
    pooled: torch.Tensor = _Pool.apply(
        rows_UD, weights_N, bags.with_offsets(rows_UD.size(0)), buffers
    )
    return pooled


class _FlatPool(Function):
    """All buckets, from the flat buffer into one output."""

    @staticmethod
    def forward(
        ctx: Any,
        flat: torch.Tensor,
        rows: FlatRows,
        slot_bags: SlotBags | None,
        bags: Sequence[Bags],
        buffers: Buffers,
        take_scale: TakeScale,
        slot_weights: torch.Tensor | None,
        *weights: torch.Tensor | None,
    ) -> torch.Tensor:
        ctx.rows, ctx.bags, ctx.buffers, ctx.take_scale = rows, bags, buffers, take_scale
        ctx.slot_bags, ctx.dtype = slot_bags, flat.dtype
        needs_rows = any(ctx.needs_input_grad[SLOT_WEIGHTS:])
        ctx.save_for_backward(*weights, slot_weights, flat if needs_rows else None)
        with stage("pooling"):
            outputs = [of_bucket.output for of_bucket in bags]
            side_by_side = _side_by_side(slot_bags, outputs)
            first, column = _behind(slot_bags)
            columns = [
                dim * (of_bucket.width if side_by_side else of_bucket.num_bags)
                for of_bucket, dim in zip(outputs, rows.dims[first:], strict=True)
            ]
            shape: tuple[int, ...] = (column + sum(columns),)
            if side_by_side:
                lines = outputs[0].num_bags // outputs[0].width if outputs else 0
                shape = (lines if slot_bags is None else slot_bags.batch, *shape)
            out = buffers.take("output", shape, flat.dtype, flat.device)
            if slot_bags is not None:
                torch.ops.fusedrec.slot_bag_sums(
                    flat, *_of_slots(rows, slot_bags, slot_weights), slot_bags.batch, out
                )
            matrix = out if side_by_side else out.view(1, -1)
            places = _places(matrix, rows.dims[first:], outputs, column)
            for k, (of_bucket, weight_N, place) in enumerate(
                zip(bags, weights, places, strict=True), first
            ):
                matrix, width, column = place
                source, addresses, ids = flat, rows.addresses[k], _ids(of_bucket, weight_N)
                copies = of_bucket.copies
                if copies is not None:
                    distinct = _distinct(buffers, "distinct bags", of_bucket, rows.dims[k], flat)
                    torch.ops.fusedrec.bag_sums(
                        source, addresses, rows.dims[k], *ids, 1, 0, distinct
                    )
                    source, addresses, ids = distinct.view(-1), None, _ids(copies, None)
                torch.ops.fusedrec.bag_sums(
                    source, addresses, rows.dims[k], *ids, width, column, matrix
                )
            return out

    @staticmethod
    @first_order
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        rows, bags = ctx.rows, ctx.bags
        *weights, slot_weights, flat = ctx.saved_tensors
        with stage("backward_pooling"):
            gradient = gradient if gradient.dim() == 2 else gradient.view(1, -1)
            if gradient.stride(1) != 1:  # as an expanded one
                gradient = gradient.contiguous()
            first, column = _behind(ctx.slot_bags)
            outputs = [of_bucket.output for of_bucket in bags]
            places = _places(gradient, rows.dims[first:], outputs, column)
            flat_gradient = None
            if ctx.needs_input_grad[0]:
                flat_gradient = ctx.buffers.take(
                    "row gradients", (rows.elements,), torch.float32, gradient.device
                )
                if bags:
                    _zero_on_cuda(flat_gradient)
                scale = ctx.take_scale()
                if ctx.slot_bags is not None:
                    of_slots = _of_slots(rows, ctx.slot_bags, slot_weights)
                    torch.ops.fusedrec.slot_row_sums(
                        gradient, *of_slots, *ctx.slot_bags.row_ids, ctx.slot_bags.batch,
                        ctx.slot_bags.columns.bags(ctx.slot_bags.batch), sum(rows.rows[:first]),
                        scale, flat_gradient,
                    )  # fmt: skip
                for k, (of_bucket, weight_N, (matrix, width, column)) in enumerate(
                    zip(bags, weights, places, strict=True), first
                ):
                    copies, dim = of_bucket.copies, rows.dims[k]
                    if copies is not None:
                        distinct = _zero_on_cuda(
                            _distinct(ctx.buffers, "bag gradients", of_bucket, dim, flat_gradient)
                        )
                        torch.ops.fusedrec.row_sums(
                            matrix, width, column, *_ids(copies, None),
                            None, distinct.size(0), dim, 1.0, distinct.view(-1),
                        )  # fmt: skip
                        matrix, width, column = distinct, 1, 0
                    torch.ops.fusedrec.row_sums(
                        matrix, width, column, *_ids(of_bucket, weight_N),
                        rows.addresses[k], rows.rows[k], dim, scale, flat_gradient,
                    )  # fmt: skip
                flat_gradient = flat_gradient.to(ctx.dtype)
            weight_gradients = [
                _weights_backward(
                    _columns(matrix, column, of_bucket, dim),
                    _rows_of(flat, rows, k),
                    of_bucket,
                    weight.dtype,
                )
                if ctx.needs_input_grad[WEIGHTS + k - first]
                else None
                for k, ((matrix, _, column), of_bucket, dim, weight) in enumerate(
                    zip(places, bags, rows.dims[first:], weights, strict=True), first
                )
            ]
            slot_weight_gradients = None
            if ctx.needs_input_grad[SLOT_WEIGHTS]:
                slot_weight_gradients = _slot_weight_gradients(
                    gradient, flat, rows, ctx.slot_bags, slot_weights
                )
        nothing = [None] * (SLOT_WEIGHTS - 1)
        return flat_gradient, *nothing, slot_weight_gradients, *weight_gradients


def _behind(slot_bags: SlotBags | None) -> tuple[int, int]:
    """Returns the first bucket and the first column that the bags of slots leave to others."""
    return (0, 0) if slot_bags is None else (len(slot_bags.columns.dims), slot_bags.columns.width)


def _side_by_side(slot_bags: SlotBags | None, outputs: Sequence[Bags]) -> bool:
    """Returns whether the bags of a sample lie side by side in the output."""
    if slot_bags is not None:
        return slot_bags.side_by_side
    return all(of_bucket.width for of_bucket in outputs)


def _of_slots(
    rows: FlatRows, slot_bags: SlotBags, weights_N: torch.Tensor | None
) -> tuple[Any, ...]:
    columns = slot_bags.columns
    if weights_N is not None:
        weights_N = weights_N.float().contiguous()
    ids = (slot_bags.rows_N, slot_bags.offsets_B1, weights_N)
    return rows.of_all, columns.dims, columns.slots_S3, *ids


def _slot_weight_gradients(
    gradient: torch.Tensor,
    flat: torch.Tensor,
    rows: FlatRows,
    slot_bags: SlotBags,
    weights_N: torch.Tensor,
) -> torch.Tensor:
    """Returns the gradients of the weights of ids; of ids that no bag has, zeros."""
    out_N = torch.zeros(weights_N.shape, dtype=torch.float32, device=weights_N.device)
    of_all, dims, slots_S3, rows_N, offsets_B1, _ = _of_slots(rows, slot_bags, None)
    torch.ops.fusedrec.slot_weight_sums(
        gradient, flat, of_all, dims, slots_S3, rows_N, offsets_B1, slot_bags.batch, out_N
    )
    return out_N.to(weights_N.dtype)


def _zero_on_cuda(sums: torch.Tensor) -> torch.Tensor:
    """Returns what ``row_sums`` writes to; kernels add to it, by and by."""
    return sums.zero_() if sums.is_cuda else sums


def _distinct(
    buffers: Buffers, name: str, bags: Bags, dim: int, like: torch.Tensor
) -> torch.Tensor:
    """Returns a buffer for one row of each distinct bag."""
    return buffers.take(name, (bags.num_bags, dim), like.dtype, like.device)


def _places(
    matrix: torch.Tensor, dims: Sequence[int], bags: Sequence[Bags], column: int
) -> list[tuple[torch.Tensor, int, int]]:
    """Returns for each bucket a matrix, how many of its bags are in a line, from which column on.

    Bags that do not lie side by side are lines of a matrix of their own.  ``column`` is the first
    one that is not taken.
    """
    places = []
    for dim, of_bucket in zip(dims, bags, strict=True):
        if all(other.width for other in bags):
            places.append((matrix, of_bucket.width, column))
            column += of_bucket.width * dim
        else:
            end = column + of_bucket.num_bags * dim
            places.append((matrix[0, column:end].view(-1, dim), 1, 0))
            column = end
    return places


def _ids(
    bags: Bags, weights_N: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:
    return (
        bags.rows_N,
        bags.offsets_B1,
        None if weights_N is None else weights_N.float().contiguous(),
        bags.divisor_B,
    )


def _columns(matrix: torch.Tensor, column: int, bags: Bags, dim: int) -> torch.Tensor:
    """Returns a bucket's bags out of the lines of an output, one in a line."""
    width = max(bags.width, 1)
    return matrix[:, column : column + width * dim].reshape(-1, dim)


def _rows_of(flat: torch.Tensor, rows: FlatRows, k: int) -> torch.Tensor:
    """Returns a bucket's rows out of the flat buffer."""
    addresses, dim = rows.addresses[k], rows.dims[k]
    if addresses is None:
        return flat.view(-1, dim)
    return flat[addresses[:, None] + torch.arange(dim, device=flat.device)]


class _Pool(Function):
    """One bucket, by torch's own operators."""

    @staticmethod
    def forward(
        ctx: Any,
        rows_UD: torch.Tensor,
        weights_N: torch.Tensor | None,
        bags: Bags,
        buffers: Buffers,
    ) -> torch.Tensor:
        ctx.bags = bags
        ctx.num_rows = rows_UD.size(0)
        weights_need_grad = weights_N is not None and ctx.needs_input_grad[1]
        ctx.save_for_backward(weights_N, rows_UD if weights_need_grad else None)
        with stage("pooling"):
            if bags.offsets_B1 is None and weights_N is None:
                shape = (bags.num_bags, rows_UD.size(1))
                out_BD = buffers.take("output", shape, rows_UD.dtype, rows_UD.device)
                return torch.index_select(rows_UD, 0, bags.rows_N, out=out_BD)
            out_BD = _bag_sums(rows_UD, bags.rows_N, bags.offsets_B1, weights_N)
            return out_BD if bags.divisor_B is None else out_BD.div_(bags.divisor_B[:, None])

    @staticmethod
    @first_order
    def backward(
        ctx: Any, grad_BD: torch.Tensor
    ) -> tuple[torch.Tensor | None, torch.Tensor | None, None, None]:
        bags: Bags = ctx.bags
        weights_N, rows_UD = ctx.saved_tensors
        grad_rows = grad_weights = None
        with stage("backward_pooling"):
            if ctx.needs_input_grad[0]:
                grad_rows = _rows_backward(grad_BD, weights_N, bags, ctx.num_rows)
            if rows_UD is not None:
                grad_weights = _weights_backward(grad_BD, rows_UD, bags, weights_N.dtype)
        return grad_rows, grad_weights, None, None


def _bag_sums(
    rows: torch.Tensor,
    indices: torch.Tensor,
    offsets: torch.Tensor | None,
    weights: torch.Tensor | None,
) -> torch.Tensor:
    """Returns weighted sums of ``rows[indices]`` over each bag, in float32 arithmetic."""
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


def _group(rows_N: torch.Tensor, num_rows: int) -> Occurrences:
    """Finds the ids of each row, where dedup did not."""
    sorted_N, order_N = torch.sort(rows_N, stable=True)
    every_row = torch.arange(num_rows + 1, dtype=sorted_N.dtype, device=sorted_N.device)
    return Occurrences(order_N.int(), torch.searchsorted(sorted_N, every_row, out_int32=True))


def _rows_backward(
    grad_BD: torch.Tensor, weights_N: torch.Tensor | None, bags: Bags, num_rows: int
) -> torch.Tensor:
    if bags.divisor_B is not None:
        grad_BD = grad_BD / bags.divisor_B[:, None]
    occurrences, bag_N = bags.occurrences or _group(bags.rows_N, num_rows), bags.bag_of_id()
    order_N = occurrences.order_N
    return _bag_sums(
        grad_BD,
        order_N if bag_N is None else bag_N.index_select(0, order_N),
        occurrences.starts_U1[: num_rows + 1],
        None if weights_N is None else weights_N.index_select(0, order_N),
    )


def _weights_backward(
    grad_BD: torch.Tensor, rows_UD: torch.Tensor, bags: Bags, dtype: torch.dtype
) -> torch.Tensor:
    if bags.divisor_B is not None:
        grad_BD = grad_BD / bags.divisor_B[:, None]
    bag_N = bags.bag_of_id()
    grad_of_id = grad_BD if bag_N is None else grad_BD.index_select(0, bag_N)
    row_of_id = rows_UD.index_select(0, bags.rows_N)
    return torch.linalg.vecdot(grad_of_id.float(), row_of_id.float()).to(dtype)
