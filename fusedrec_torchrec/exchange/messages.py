"""Messages of a header and ids: one round, and a second one if ids do not fit.

    message = [ status | wanted capacity | overflow | counts | words ... ]

Counts are the units of each bucket, and the ids of each bucket whose owners pool bags; ``cargo``
tells what the words are.

With replicated rows the header also has a *stale* flag, for replicas that must be loaded anew, and
the number of replicated rows of each bucket, the same in all messages of a sender.
"""

from itertools import accumulate

import torch
import torch.distributed as dist
from torchrec.distributed.types import Awaitable, NoWait

from fusedrec_torchrec.core import operators
from fusedrec_torchrec.core.buffer_order import bucket_major
from fusedrec_torchrec.core.lost_rank import wait
from fusedrec_torchrec.core.stages import stage
from fusedrec_torchrec.core.transfer import to_device, to_host
from fusedrec_torchrec.exchange.bag_routing import BagRoute
from fusedrec_torchrec.exchange.cargo import Cargo
from fusedrec_torchrec.exchange.context import FusedShardingContext, ReceivedRows
from fusedrec_torchrec.exchange.outgoing_batch import InputAwaitable, OutgoingBatch
from fusedrec_torchrec.exchange.statuses import BAD, Statuses

__all__ = ["ExactAwaitable", "HeaderAwaitable"]

STATUS, WANTED, OVERFLOW, COUNTS = 0, 1, 2, 3
INT32_MAX = torch.iinfo(torch.int32).max


class HeaderAwaitable(InputAwaitable):
    """The first (and, unless it overflows, only) round: sends on construction."""

    def __init__(self, batch: OutgoingBatch) -> None:
        super().__init__(batch)
        self._exchange = exchange = batch.exchange
        self._cargo = batch.cargo
        self._counts = self._cargo.counts_HO.size(0)
        self._header = COUNTS + self._counts
        if batch.context.replicas is not None:
            self._header += 1 + self._cargo.replica_counts_K.numel()
        self._capacity = exchange.capacity.current
        self._known_overflow = False
        # All numbers stay on the device.
        device = self._cargo.counts_KO.device
        self._by_kernels = (
            device.type == "cuda"
            and not isinstance(self._cargo.bags, BagRoute)
            and operators.available_on(device, "write_headers", "collect_headers")
        )
        send = self._messages()
        self._everyone = None
        if exchange.everyone is not None:
            # The kernel that writes the headers has put all statuses in one.
            status = send[0, STATUS] if self._by_kernels else batch.status
            self._everyone = Statuses(exchange.everyone, status)
        self._received = torch.empty_like(send)
        self._work = dist.all_to_all_single(self._received, send, group=exchange.pg, async_op=True)
        self._send = send  # kept alive until the exchange is done

    def _messages(self) -> torch.Tensor:
        """Returns [W, header + capacity] int32; headers last, words that overflow run over them."""
        ranks, width = self._exchange.ranks, self._header + self._capacity
        flat = self._cargo.counts_KO.new_empty(ranks * width + 1, dtype=torch.int32)
        messages = flat[:-1].view(ranks, width)
        headers = None if self._by_kernels else self._headers(self._batch.status)
        if self._capacity and not self._known_overflow:
            self._cargo.write(flat, [r * width + self._header for r in range(ranks)])
        if headers is None:
            torch.ops.fusedrec.write_headers(
                self._batch.statuses,
                self._cargo.counts_HO,
                messages,
                self._capacity,
                *self._exchange.capacity.rule,
                self._batch.stale,
                self._cargo.bag_buckets,
                self._cargo.words_per_id,
            )
        else:
            messages[:, : self._header] = headers
        return messages

    def _headers(self, status: torch.Tensor) -> torch.Tensor:
        counts_WH, capacity = self._cargo.counts_WH, self._exchange.capacity
        replicas_K = self._cargo.replica_counts_K
        if status.device.type == "cpu":  # numbers are cheaper than tensors, and at hand
            counts = counts_WH.tolist()
            most = max(self._cargo.words_W.tolist())
            self._known_overflow = most > self._capacity
            words = [int(status), min(capacity.wanted(most), INT32_MAX), int(self._known_overflow)]
            last = [int(self._batch.stale), *replicas_K.tolist()] if replicas_K.numel() else []
            return torch.tensor([words + row + last for row in counts], dtype=torch.int32)
        largest = self._cargo.words_W.max()
        wanted = capacity.wanted(largest).clamp(max=INT32_MAX)
        if self._cargo.bags is not None:  # bags that do not fit cannot be written
            self._known_overflow = bool(largest > self._capacity)
        parts = [status, wanted, largest > self._capacity]
        same = torch.stack([part.to(counts_WH.dtype) for part in parts])
        columns = [same.expand(counts_WH.size(0), -1), counts_WH]
        if replicas_K.numel():
            stale = replicas_K.new_full((1,), int(self._batch.stale))
            columns.append(torch.cat([stale, replicas_K]).expand(counts_WH.size(0), -1))
        return torch.cat(columns, dim=1)

    def _receive(self) -> Awaitable[ReceivedRows]:
        wait(self._work, self._exchange.pg, "ids")
        ranks, buckets = self._received.size(0), self._cargo.counts_KO.size(0)
        statuses = None if self._everyone is None else self._everyone.wait()
        words = self._read(statuses)
        rows = [words[r * self._header : (r + 1) * self._header] for r in range(ranks)]
        self._exchange.capacity.update(max(row[WANTED] for row in rows))
        failures = [row[STATUS] for row in rows]
        if statuses is not None:
            words, failures = words[: -statuses.numel()], words[-statuses.numel() :]
        failed = [rank for rank, status in enumerate(failures) if status == BAD]
        if failed:
            self._batch.fail(failed)
        self._batch.check_end_of_data(failures)
        out, words_out = words[ranks * self._header : -ranks], words[-ranks:]
        units, end = COUNTS + buckets, COUNTS + self._counts
        self.context.counts_in = [row[COUNTS:units] for row in rows]
        self.context.ids_in = [row[units:end] for row in rows]
        self._batch.arrived(
            [out[i : i + buckets] for i in range(0, len(out), buckets)],
            replica_counts=[row[end + 1 :] for row in rows],
            stale=any(row[end] for row in rows) if self._header > end else False,
        )
        if any(row[OVERFLOW] for row in rows):
            return ExactAwaitable(self._exchange.pg, self._cargo, words_out, self.context)
        return NoWait(ReceivedRows(self._segments(), self.context))

    def _read(self, statuses: torch.Tensor | None) -> list[int]:
        """Returns headers, counts, words of each rank and statuses, if there are any.

        This is the one host synchronisation of the exchange: what came in, and what went out.
        """
        if self._by_kernels:
            nobody = self._received.new_empty(0)
            collected = torch.ops.fusedrec.collect_headers(
                self._received,
                self._header,
                self._cargo.counts_HO,
                nobody if statuses is None else statuses,
                self._cargo.bag_buckets,
                self._cargo.words_per_id,
            )
            return to_host(collected)
        headers = self._received[:, : self._header]
        parts = [headers, self._cargo.counts_KO.t().to(headers.dtype)]
        parts.append(self._cargo.words_W.to(headers.dtype))
        if statuses is not None:
            parts.append(statuses)
        words: list[int] = torch.cat([part.flatten() for part in parts]).tolist()
        return words

    def _segments(self) -> list[torch.Tensor]:
        """Returns what is in all messages, without headers and padding, segment by segment."""
        segments = self.context.segments_in()
        if operators.available_on(self._received.device, "unpack"):
            flat = [size for row in segments for size in row]
            unpack = torch.ops.fusedrec.unpack
            return list(unpack(self._received, self._header, flat, len(segments[0])))
        sizes = self.context.words_in()
        width = self._received.size(1)
        device = self._received.device
        starts = list(accumulate(sizes, initial=0))
        shifts = [r * width + self._header - start for r, start in enumerate(starts[:-1])]
        index_R = torch.arange(starts[-1], device=device) + torch.repeat_interleave(
            to_device(shifts, device), to_device(sizes, device), output_size=starts[-1]
        )
        return bucket_major(self._received.view(-1).index_select(0, index_R), segments)


class ExactAwaitable(Awaitable[ReceivedRows]):
    """The second round, with sizes that all ranks know from the headers."""

    def __init__(
        self,
        pg: dist.ProcessGroup,
        cargo: Cargo,
        send_splits: list[int],
        context: FusedShardingContext,
    ) -> None:
        super().__init__()
        receive_splits = context.words_in()
        self._pg = pg
        starts = list(accumulate(send_splits, initial=0))
        self._send = cargo.counts_KO.new_empty(starts[-1] + 1, dtype=torch.int32)
        cargo.write(self._send, starts[:-1])
        self._words = self._send.new_empty(sum(receive_splits))
        self._context = context
        self._work = dist.all_to_all_single(
            self._words,
            self._send[:-1],
            receive_splits,
            send_splits,
            group=pg,
            async_op=True,
        )

    def _wait_impl(self) -> ReceivedRows:
        with stage("ids"):
            wait(self._work, self._pg, "ids")
        segments = bucket_major(self._words, self._context.segments_in())
        return ReceivedRows(segments, self._context)
