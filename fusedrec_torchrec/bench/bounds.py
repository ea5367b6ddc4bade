"""Measures the least that a deduplicating step can cost, with the same data.

Three bare operations, in buffers that were made before where they take any:

- *exchange*: all-to-all of the ids, of the rows and of the gradients, exactly the unique ones;
- *lookup*: FBGEMM's lookup and update of the rows this rank was asked for;
- *gather*: received rows to the output, once.

Dedup itself, the sums of gradients and every check come on top of that.

Units are rows, or bags that their owners pool: then the lookup pools them, and the gather copies.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torchrec.distributed.types import ParameterSharding

from fusedrec_torchrec.bench.systems import System
from fusedrec_torchrec.bench.workload import Workload
from fusedrec_torchrec.compat.lookups import lookups_of
from fusedrec_torchrec.core.buffers import Buffers
from fusedrec_torchrec.core.operators import available_on
from fusedrec_torchrec.exchange.asked import Asked
from fusedrec_torchrec.exchange.bags import Bags
from fusedrec_torchrec.exchange.context import FusedShardingContext, ReceivedRows
from fusedrec_torchrec.exchange.flat_rows import FlatRows
from fusedrec_torchrec.exchange.lookup import FusedLookup
from fusedrec_torchrec.exchange.pooling import pool
from fusedrec_torchrec.exchange.slot_bags import SlotBags
from fusedrec_torchrec.exchange.slot_sequences import SlotSequences, gather
from fusedrec_torchrec.sharding.sharding_type import FUSED_TYPES

__all__ = ["Bounds", "bounded"]


def bounded(plan: Mapping[str, ParameterSharding]) -> bool:
    """Returns whether there are lower bounds for a plan: all of its tables are fused."""
    return all(sharding.sharding_type in FUSED_TYPES for sharding in plan.values())


@dataclass
class _Batch:
    """Holds what the fused step exchanges for one batch.

    Attributes:
        counts_out: [owner][bucket] units this rank asks for.
        counts_in: [requester][bucket] units this rank is asked for.
        words_out: [owner] words of four bytes that say so: rows, and lengths of bags.
        words_in: [requester] words that this rank is asked by.
        asked: in each call of the lookup, what this rank is asked for.
        bags: of each bucket, which received units form which output.
        slot_bags: the same for all slots, if only the device knows; then there are no ``bags``.
    """

    counts_out: list[list[int]]
    counts_in: list[list[int]]
    words_out: list[int]
    words_in: list[int]
    asked: list[Asked]
    bags: list[Bags]
    slot_bags: SlotBags | SlotSequences | None


class Bounds:
    """Measures lower bounds of a system all of whose tables are fused, on a workload.

    Attributes:
        operations: the bare operations by name; each takes the number of a batch.
    """

    def __init__(self, fused: System, workload: Workload) -> None:
        assert bounded(fused.plan)
        module = fused.model.module.embeddings
        (lookup,) = lookups_of(module)
        assert isinstance(lookup, FusedLookup)
        self._look_up = lookup
        self._dims = [bucket.dim for bucket in module.fused.tables.buckets]
        self._device = fused.device
        batches = [batch.to(self._device) for batch in workload.batches]
        self._batches = [self._exchanged(module, batch) for batch in batches]
        self._make_buffers()
        self.operations: dict[str, Callable[[int], None]] = {
            "exchange": self._exchange,
            "lookup": self._lookup,
            "gather": self._gather,
        }

    def _exchanged(self, module: Any, batch: object) -> _Batch:
        context = module.create_context()
        received = module.input_dist(context, batch).wait().wait()[0]
        fused = context.sharding_contexts[0]
        assert isinstance(received, ReceivedRows) and isinstance(fused, FusedShardingContext)
        words_in = torch.tensor(fused.words_in(), device=self._device)
        words_out = torch.empty_like(words_in)
        dist.all_to_all_single(words_out, words_in)
        return _Batch(
            fused.counts_out,
            fused.counts_in,
            words_out.tolist(),
            words_in.tolist(),
            self._look_up.asked(received),
            fused.bags,
            fused.slot_bags,
        )

    def _elements(self, counts: list[list[int]]) -> list[int]:
        return [sum(n * d for n, d in zip(row, self._dims, strict=True)) for row in counts]

    def _make_buffers(self) -> None:
        out = max(sum(self._elements(b.counts_out)) for b in self._batches)
        received = max(sum(self._elements(b.counts_in)) for b in self._batches)
        self._asked = torch.zeros(out, device=self._device)
        self._owned = torch.zeros(received, device=self._device)
        ids = max(sum(b.words_out) + sum(b.words_in) for b in self._batches)
        self._ids_out = torch.zeros(ids, dtype=torch.int32, device=self._device)
        self._ids_in = torch.zeros(ids, dtype=torch.int32, device=self._device)
        self._buffers = Buffers()
        # Of slots whose bags only the device knows, memory that comes back is as good.
        dims = [] if self._batches[0].slot_bags is not None else self._dims
        self._outputs = [
            torch.zeros(
                max(b.bags[k].output.num_bags for b in self._batches), dim, device=self._device
            )
            for k, dim in enumerate(dims)
        ]
        self._distinct = [
            torch.zeros(max(b.bags[k].num_bags for b in self._batches), dim, device=self._device)
            if any(b.bags[k].copies is not None for b in self._batches)
            else None
            for k, dim in enumerate(dims)
        ]

    def _exchange(self, number: int) -> None:
        batch = self._batches[number]
        ids_out, ids_in = batch.words_out, batch.words_in
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
        for rows_UD in self._look_up.look_up(batch.asked, batch.counts_in):
            rows_UD.backward(self._owned[: rows_UD.numel()].view_as(rows_UD))

    def _gather(self, number: int) -> None:
        batch = self._batches[number]
        if batch.slot_bags is not None:
            self._gather_slots(batch, batch.slot_bags)
            return
        starts = [0]
        for k, dim in enumerate(self._dims):
            starts.append(starts[-1] + dim * sum(row[k] for row in batch.counts_out))
        for k, (bags, dim) in enumerate(zip(batch.bags, self._dims, strict=True)):
            rows = self._asked[starts[k] : starts[k + 1]].view(-1, dim)
            distinct = self._distinct[k]
            if bags.copies is None or distinct is None:
                _pool(rows, bags, self._outputs[k])
            else:
                _pool(rows, bags, distinct)
                _pool(distinct[: bags.num_bags], bags.copies, self._outputs[k])

    @torch.no_grad()
    def _gather_slots(self, batch: _Batch, slot_bags: SlotBags | SlotSequences) -> None:
        """Gathers rows of all slots, and those of bags that owners have pooled behind them."""
        flat = self._asked[: sum(self._elements(batch.counts_out))]
        if isinstance(slot_bags, SlotSequences):
            rows = FlatRows(batch.counts_out, self._dims, self._device)
            gather(flat, rows, slot_bags, self._buffers, lambda: 1.0)
            return
        weights = [None] * len(batch.bags)
        pool(
            *(flat, batch.counts_out, self._dims, weights, batch.bags, self._buffers),
            slot_bags=slot_bags,
        )


def _pool(rows: torch.Tensor, bags: Bags, out: torch.Tensor) -> None:
    """Pools rows by the faster of the two ways that there are on this machine."""
    if available_on(rows.device, "bag_sums"):
        torch.ops.fusedrec.bag_sums(
            *(rows, None, rows.size(1), bags.rows_N, bags.offsets_B1, None, None, 1, 0),
            out[: bags.num_bags],
        )
        return
    bags = bags.with_offsets(rows.size(0))
    if bags.offsets_B1 is None:
        torch.index_select(rows, 0, bags.rows_N, out=out[: bags.num_bags])
    elif rows.numel():
        torch.embedding_bag(
            rows,
            bags.rows_N,
            bags.offsets_B1.to(bags.rows_N.dtype),
            mode=0,
            include_last_offset=True,
        )
