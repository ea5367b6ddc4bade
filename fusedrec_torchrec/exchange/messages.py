"""Messages of a header and ids: one round, and a second one if ids do not fit.

    message = [ status | wanted capacity | overflow | count per bucket | int32 local rows ... ]

With replicated rows the header also has a *stale* flag, for replicas that must be loaded anew, and
the number of replicated rows of each bucket, the same in all messages of a sender.
"""

import torch
import torch.distributed as dist
from torchrec.distributed.types import Awaitable, NoWait

from fusedrec_torchrec.core import native
from fusedrec_torchrec.core.lost_rank import wait
from fusedrec_torchrec.core.stages import stage
from fusedrec_torchrec.exchange.context import FusedShardingContext, ReceivedRows
from fusedrec_torchrec.exchange.outgoing_batch import InputAwaitable, OutgoingBatch
from fusedrec_torchrec.exchange.routing import Route
from fusedrec_torchrec.exchange.statuses import BAD, Statuses

__all__ = ["ExactAwaitable", "HeaderAwaitable"]

STATUS, WANTED, OVERFLOW, COUNTS = 0, 1, 2, 3
INT32_MAX = torch.iinfo(torch.int32).max


class HeaderAwaitable(InputAwaitable):
    """The first (and, unless it overflows, only) round: sends on construction."""

    def __init__(self, batch: OutgoingBatch) -> None:
        super().__init__(batch)
        self._exchange = exchange = batch.exchange
        self._routed = batch.routed
        self._buckets = len(exchange.layout.buckets)
        self._header = COUNTS + self._buckets
        if batch.context.replicas is not None:
            self._header += 1 + self._buckets
        self._capacity = exchange.capacity.current
        self._everyone = None
        if exchange.everyone is not None:
            self._everyone = Statuses(exchange.everyone, batch.status)
        send = self._messages(batch.status)
        self._received = torch.empty_like(send)
        self._work = dist.all_to_all_single(self._received, send, group=exchange.pg, async_op=True)
        self._send = send  # kept alive until the exchange is done

    def _messages(self, status: torch.Tensor) -> torch.Tensor:
        """Returns [W, header + capacity] int32; headers last, rows that overflow run over them."""
        ranks, width = self._exchange.layout.world_size, self._header + self._capacity
        flat = self._routed.counts_KO.new_empty(ranks * width + 1, dtype=torch.int32)
        if self._capacity:
            self._routed.pack(flat, self._header)
        messages = flat[:-1].view(ranks, width)
        messages[:, : self._header] = self._headers(status)
        return messages

    def _headers(self, status: torch.Tensor) -> torch.Tensor:
        counts_WK, capacity = self._routed.counts_KW.t(), self._exchange.capacity
        replicas_K = self._batch.replica_counts_K
        if status.device.type == "cpu":  # numbers are cheaper than tensors, and at hand
            counts = counts_WK.tolist()
            most = max(map(sum, counts))
            words = [int(status), min(capacity.wanted(most), INT32_MAX), int(most > self._capacity)]
            last = [int(self._batch.stale), *replicas_K.tolist()] if replicas_K.numel() else []
            return torch.tensor([words + row + last for row in counts], dtype=torch.int32)
        largest = counts_WK.sum(1).max()
        wanted = capacity.wanted(largest).clamp(max=INT32_MAX)
        parts = [status, wanted, largest > self._capacity]
        same = torch.stack([part.to(counts_WK.dtype) for part in parts])
        columns = [same.expand(counts_WK.size(0), -1), counts_WK]
        if replicas_K.numel():
            stale = replicas_K.new_full((1,), int(self._batch.stale))
            columns.append(torch.cat([stale, replicas_K]).expand(counts_WK.size(0), -1))
        return torch.cat(columns, dim=1)

    def _receive(self) -> Awaitable[ReceivedRows]:
        wait(self._work, self._exchange.pg, "ids")
        ranks, buckets = self._received.size(0), self._buckets
        header_W = self._received[:, : self._header]
        counts_OK = self._routed.counts_KO.t().to(header_W.dtype)
        statuses = header_W[:, STATUS] if self._everyone is None else self._everyone.wait()
        # The one host synchronisation of the exchange: what came in, and what went out.
        words = torch.cat([header_W.flatten(), counts_OK.flatten(), statuses]).tolist()
        rows = [words[r * self._header : (r + 1) * self._header] for r in range(ranks)]
        self._exchange.capacity.update(max(row[WANTED] for row in rows))
        words, failures = words[: -statuses.numel()], words[-statuses.numel() :]
        failed = [rank for rank, status in enumerate(failures) if status == BAD]
        if failed:
            self._batch.fail(failed)
        self._batch.check_end_of_data(failures)
        out = words[ranks * self._header :]
        self.context.counts_in = [row[COUNTS : COUNTS + buckets] for row in rows]
        replica_words = [row[COUNTS + buckets :] for row in rows]
        self._batch.arrived(
            [out[i : i + buckets] for i in range(0, len(out), buckets)],
            replica_counts=[word[1:] for word in replica_words],
            stale=any(word[0] for word in replica_words if word),
        )
        if any(row[OVERFLOW] for row in rows):
            return ExactAwaitable(self._exchange.pg, self._routed, self.context)
        return NoWait(ReceivedRows(self._compact(), self.context))

    def _compact(self) -> torch.Tensor:
        """Returns the rows of all messages, without headers and padding."""
        first, end = COUNTS, COUNTS + self._buckets
        if native.available_on(self._received.device):
            return torch.ops.fusedrec.unpack(self._received, first, end, self._header)
        total = sum(map(sum, self.context.counts_in))
        ranks, width = self._received.shape
        device = self._received.device
        counts_W = self._received[:, first:end].sum(1)
        starts_W = counts_W.cumsum(0) - counts_W
        shift_W = torch.arange(ranks, device=device) * width + self._header - starts_W
        index_R = torch.arange(total, device=device) + torch.repeat_interleave(
            shift_W, counts_W, output_size=total
        )
        return self._received.view(-1).index_select(0, index_R)


class ExactAwaitable(Awaitable[ReceivedRows]):
    """The second round, with sizes that all ranks know from the headers."""

    def __init__(self, pg: dist.ProcessGroup, routed: Route, context: FusedShardingContext) -> None:
        super().__init__()
        send_splits = [sum(row) for row in context.counts_out[: pg.size()]]
        receive_splits = [sum(row) for row in context.counts_in]
        self._pg = pg
        self._send = routed.wire_order()
        self._rows = self._send.new_empty(sum(receive_splits))
        self._context = context
        self._work = dist.all_to_all_single(
            self._rows,
            self._send[: sum(send_splits)],
            receive_splits,
            send_splits,
            group=pg,
            async_op=True,
        )

    def _wait_impl(self) -> ReceivedRows:
        with stage("ids"):
            wait(self._work, self._pg, "ids")
        return ReceivedRows(self._rows, self._context)
