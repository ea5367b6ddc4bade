"""Batches of nothing but replicated rows, which need no exchange (FAE's hot batches)."""

import torch
import torch.distributed as dist
from torchrec.distributed.types import Awaitable, NoWait

from fusedrec_torchrec.core import operators
from fusedrec_torchrec.core.lost_rank import wait
from fusedrec_torchrec.core.transfer import to_host
from fusedrec_torchrec.exchange.context import ReceivedRows
from fusedrec_torchrec.exchange.messages import HeaderAwaitable
from fusedrec_torchrec.exchange.outgoing_batch import InputAwaitable, OutgoingBatch

__all__ = ["AllReplicatedAwaitable"]


class AllReplicatedAwaitable(InputAwaitable):
    """Asks all ranks whether any batch has rows that are not replicated; if none has, that is all.

    Whatever else there is to say is left to the messages.
    """

    def __init__(self, batch: OutgoingBatch) -> None:
        super().__init__(batch)
        own, pg = _own_words(batch), batch.exchange.pg
        self._words = own.new_empty(pg.size() * own.numel())
        # Not an all-reduce: gloo takes three times as long for one.
        self._work = dist.all_gather_single(self._words, own, group=pg, async_op=True)

    def _receive(self) -> Awaitable[ReceivedRows]:
        batch, cargo = self._batch, self._batch.cargo
        ranks, buckets = batch.exchange.ranks, cargo.counts_KO.size(0)
        wait(self._work, batch.exchange.pg, "ids")
        flat = to_host(self._words)
        size = len(flat) // ranks
        words = [flat[r * size : (r + 1) * size] for r in range(ranks)]
        batch.check_end_of_data([row[0] for row in words])
        if any(failed or needs_owners for failed, needs_owners, *_ in words):
            return _Messages(HeaderAwaitable(batch))
        nothing = [[0] * buckets for _ in range(ranks)]
        batch.context.counts_in = nothing
        batch.context.ids_in = [[0] * (cargo.counts_WH.size(1) - buckets) for _ in range(ranks)]
        replica_counts = [row[3:] for row in words]
        replicated = replica_counts[batch.exchange.pg.rank()]
        batch.arrived(
            [*nothing, replicated + [0] * (buckets - len(replicated))],
            replica_counts,
            stale=any(row[2] for row in words),
            needs_owners=False,
        )
        segments = len(batch.context.segments_in()[0])
        nothing_asked = [self._words.new_empty(0) for _ in range(segments)]
        return NoWait(ReceivedRows(nothing_asked, batch.context))


def _own_words(batch: OutgoingBatch) -> torch.Tensor:
    """Returns [status | needs owners | stale | replicated rows of each bucket] of this rank."""
    cargo, device = batch.cargo, batch.cargo.counts_KO.device
    if device.type == "cuda" and operators.available_on(device, "ask_owners"):
        own: torch.Tensor = torch.ops.fusedrec.ask_owners(
            batch.statuses,
            cargo.counts_KO,
            batch.exchange.ranks,
            cargo.replica_counts_K.numel(),
            batch.stale,
        )
        return own
    counts_KW = cargo.counts_KW
    words = [
        batch.status,
        counts_KW.any(),
        counts_KW.new_full((), batch.stale),  # filled on the device: no copy to wait for
        *cargo.replica_counts_K,
    ]
    return torch.stack([word.int() for word in words])


class _Messages(Awaitable[ReceivedRows]):
    """Messages that were sent when TorchRec expected them to have arrived."""

    def __init__(self, header: HeaderAwaitable) -> None:
        super().__init__()
        self._header = header

    def _wait_impl(self) -> ReceivedRows:
        return self._header.wait().wait()
