"""Measures the least that a deduplicating step can cost, with the same data.

Three bare operations, in buffers that were made before where they take any:

- *exchange*: all-to-all of the ids, of the rows and of the gradients, exactly the unique ones;
- *lookup*: FBGEMM's lookup and update of the rows this rank was asked for;
- *gather*: received rows to the output, once.

Dedup itself, the sums of gradients and every check come on top of that.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from fusedrec_torchrec.bench.systems import System
from fusedrec_torchrec.bench.workload import Workload
from fusedrec_torchrec.compat.lookups import lookups_of
from fusedrec_torchrec.core import native
from fusedrec_torchrec.core.buffer_order import bucket_major
from fusedrec_torchrec.exchange.bags import Bags
from fusedrec_torchrec.exchange.context import FusedShardingContext, ReceivedRows
from fusedrec_torchrec.exchange.lookup import FusedLookup

__all__ = ["Bounds"]


@dataclass
class _Batch:
    """Holds what the fused step exchanges for one batch."""

    counts_out: list[list[int]]
    counts_in: list[list[int]]
    rows_R: torch.Tensor
    bags: list[Bags]


class Bounds:
    """Measures lower bounds of the fused system on a workload.

    Attributes:
        operations: the bare operations by name; each takes the number of a batch.
        counts: what this rank's first batch asks for: ``ids``; ``outputs``, the rows of output
            they make; ``unique``, the distinct rows among them; ``unique_remote_bytes``, the size
            of those that another rank owns.
    """

    def __init__(self, fused: System, workload: Workload) -> None:
        module = fused.model.module.embeddings
        lookup = lookups_of(module)[0]
        assert isinstance(lookup, FusedLookup)
        self._kernels = lookup.kernels
        self._dims = [kernel.config.embedding_tables[0].local_cols for kernel in self._kernels]
        self._batches = [self._exchanged(module, batch) for batch in workload.batches]
        self._make_buffers()
        self.operations: dict[str, Callable[[int], None]] = {
            "exchange": self._exchange,
            "lookup": self._lookup,
            "gather": self._gather,
        }
        self.counts = _counts(workload)

    @staticmethod
    def _exchanged(module: Any, batch: object) -> _Batch:
        context = module.create_context()
        received = module.input_dist(context, batch).wait().wait()[0]
        fused = context.sharding_contexts[0]
        assert isinstance(received, ReceivedRows) and isinstance(fused, FusedShardingContext)
        return _Batch(fused.counts_out, fused.counts_in, received.rows_R, fused.bags)

    def _elements(self, counts: list[list[int]]) -> list[int]:
        return [sum(n * d for n, d in zip(row, self._dims, strict=True)) for row in counts]

    def _make_buffers(self) -> None:
        out = max(sum(self._elements(b.counts_out)) for b in self._batches)
        received = max(sum(self._elements(b.counts_in)) for b in self._batches)
        self._asked = torch.zeros(out)
        self._owned = torch.zeros(received)
        ids = max(sum(map(sum, (*b.counts_out, *b.counts_in))) for b in self._batches)
        self._ids_out = torch.zeros(ids, dtype=torch.int32)
        self._ids_in = torch.zeros(ids, dtype=torch.int32)
        self._outputs = [
            torch.zeros(max(b.bags[k].num_bags for b in self._batches), dim)
            for k, dim in enumerate(self._dims)
        ]

    def _exchange(self, number: int) -> None:
        batch = self._batches[number]
        ids_out, ids_in = ([sum(row) for row in c] for c in (batch.counts_out, batch.counts_in))
        dist.all_to_all_single(
            self._ids_in[: sum(ids_in)], self._ids_out[: sum(ids_out)], ids_in, ids_out
        )
        asked, owned = self._elements(batch.counts_out), self._elements(batch.counts_in)
        rows, own = self._asked[: sum(asked)], self._owned[: sum(owned)]
        dist.all_to_all_single(rows, own, asked, owned)
        dist.all_to_all_single(own, rows, owned, asked)

    def _lookup(self, number: int) -> None:
        """Looks up and updates rows; the gradient is zero, so that the model stays what it was."""
        batch = self._batches[number]
        for kernel, rows_R in zip(
            self._kernels, bucket_major(batch.rows_R, batch.counts_in), strict=True
        ):
            rows_RD = kernel(rows_R)
            rows_RD.backward(self._owned[: rows_RD.numel()].view_as(rows_RD))

    def _gather(self, number: int) -> None:
        batch = self._batches[number]
        starts = [0]
        for k, dim in enumerate(self._dims):
            starts.append(starts[-1] + dim * sum(row[k] for row in batch.counts_out))
        for k, (bags, dim) in enumerate(zip(batch.bags, self._dims, strict=True)):
            rows = self._asked[starts[k] : starts[k + 1]].view(-1, dim)
            if native.available_on(rows.device):  # the faster of the two
                torch.ops.fusedrec.bag_sums(
                    *(rows, None, dim, bags.rows_N, bags.offsets_B1, None, None, 1, 0),
                    self._outputs[k][: bags.num_bags],
                )
            elif bags.offsets_B1 is None:
                torch.index_select(rows, 0, bags.rows_N, out=self._outputs[k][: bags.num_bags])
            elif rows.numel():
                torch.embedding_bag(
                    rows,
                    bags.rows_N,
                    bags.offsets_B1.to(bags.rows_N.dtype),
                    mode=0,
                    include_last_offset=True,
                )


def _counts(workload: Workload) -> dict[str, int]:
    """Counts what the first batch asks for, without the exchange's own arithmetic."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    unique = remote_bytes = 0
    batch = workload.batches[0]
    for (name, rows), dim in zip(workload.table_rows.items(), workload.dims, strict=True):
        ids = batch[name].values().unique()
        per_rank = -(-rows // ranks)  # fused_row_wise splits tables evenly
        unique += ids.numel()
        remote_bytes += int((ids // per_rank != rank).sum()) * dim * 4
    ids_in_batch = batch.values().numel()
    is_sequence = workload.config.module == "ec"
    return {
        "ids": ids_in_batch,
        "outputs": ids_in_batch if is_sequence else batch.lengths().numel(),
        "unique": unique,
        "unique_remote_bytes": remote_bytes,
    }
