"""The input dist: every owner learns which of its rows each requester wants, in ONE all-to-all.

A classic exchange sends counts first, then ids.  Here every message has a fixed capacity and a
header, so that one collective does both:

    message = [ status | wanted capacity | overflow | count per bucket | int32 local rows ... ]

With hot rows the header also has a *stale* flag, for replicas that must be loaded anew, and the
number of hot rows of each bucket, the same in all messages of a sender.

- *status*: ``BAD`` if the sender's input is bad.  It still sends its messages, whose rows mean
  nothing then; every rank sees it, and all raise the same error in the same step.
  ``END_OF_DATA`` if the sender has no batch for this step; unless all ranks say so, it is an error
  on all of them.
- *wanted capacity*: the same number in all messages of a sender.  Every rank computes the next
  capacity from the maximum of what it received, so all agree without asking.
- *overflow*: the sender has more ids for some owner than fit.  Every rank sees the flag, and all
  run one exact second round; nothing is lost.

The exact-counts mode is the same protocol with capacity zero: the headers are the counts, and
the second round is the exchange.

With 2D parallelism the exchange is among the ranks of a group, but bad input of one group must stop
all of them, or they would wait for it later on: a small all-gather of all ranks' status words goes
beside the messages.
"""

import math
from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING, TypeVar

import torch
import torch.distributed as dist
from torchrec.distributed.embedding_sharding import BaseSparseFeaturesDist
from torchrec.distributed.types import Awaitable, NoWait
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from fusedrec_torchrec.core import native
from fusedrec_torchrec.core.all_ranks import listed_ranks
from fusedrec_torchrec.core.lost_rank import wait
from fusedrec_torchrec.core.stages import stage
from fusedrec_torchrec.exchange.agreement import raise_on_all_ranks
from fusedrec_torchrec.exchange.bags import pooled_bags, sequence_bags
from fusedrec_torchrec.exchange.context import FusedShardingContext, ReceivedRows
from fusedrec_torchrec.exchange.dedup import Dedup, Grouping, Unique
from fusedrec_torchrec.exchange.keys import KeySpace
from fusedrec_torchrec.exchange.layout import ExchangeLayout
from fusedrec_torchrec.exchange.options import ExchangeOptions
from fusedrec_torchrec.exchange.routing import Route

if TYPE_CHECKING:
    from fusedrec_torchrec.hot.rows import HotRows

__all__ = ["Capacity", "FusedInputDist"]

STATUS, WANTED, OVERFLOW, COUNTS = 0, 1, 2, 3
BAD, END_OF_DATA = 1, 2
GRANULE = 64
INT32_MAX = torch.iinfo(torch.int32).max
SLACK_ONE = 1 << 16  # what 1.0 is, in whole numbers
Count = TypeVar("Count", int, torch.Tensor)

# Whether something is wrong with a batch, and what.
Report = tuple[torch.Tensor, Callable[[], str]]


class Capacity:
    """The room of a message, in ids; the same on all ranks in every step.

    It only depends on the ``wanted`` values of the headers, which all ranks have in common.
    It grows at once and shrinks slowly, so that a small batch does not make the next one
    overflow.
    """

    def __init__(self, options: ExchangeOptions) -> None:
        self._exact = options.input_dist == "exact_counts"
        self._slack = round((1 + options.capacity_slack) * SLACK_ONE)
        self.current = 0

    def wanted(self, largest_count: Count) -> Count:
        """What a rank asks for whose fullest message holds ``largest_count`` ids.

        In whole numbers, and for numbers on the host as for those on a device.
        """
        if self._exact:
            return largest_count * 0
        granules = (largest_count * self._slack + SLACK_ONE * GRANULE - 1) // (SLACK_ONE * GRANULE)
        return granules * GRANULE

    def update(self, largest_wanted: int) -> None:
        decayed = math.floor(self.current * 15 / 16 / GRANULE) * GRANULE
        self.current = max(largest_wanted, decayed)


class FusedInputDist(BaseSparseFeaturesDist[ReceivedRows]):
    """Requester side up to the owner's received rows.

    Args:
        pg: the process group.
        layout: where rows live.
        options: the user's settings.
        mean_S: whether a slot is mean-pooled; None for sequences, which do not pool.
        weighted: whether the weights of a batch count.
        hot: the hot rows; None if there are none.
        everyone: all ranks that must hear of bad input; ``pg`` if None.
    """

    def __init__(
        self,
        pg: dist.ProcessGroup,
        layout: ExchangeLayout,
        options: ExchangeOptions,
        mean_S: torch.Tensor | None,
        weighted: bool = False,
        hot: "HotRows | None" = None,
        everyone: dist.ProcessGroup | None = None,
    ) -> None:
        super().__init__()
        self.pg = pg
        self.everyone = everyone
        self.hot = hot
        self._weighted = weighted
        self.layout = layout
        self.capacity = Capacity(options)
        self.keys = KeySpace(layout, options)
        self._dedup = Dedup(layout.part_starts_P1)
        self._pooled = mean_S is not None
        self._mean_per_bucket = [
            mean_S[b.first_slot : b.end_slot].to(layout.device)
            if mean_S is not None and bool(mean_S[b.first_slot : b.end_slot].any())
            else None
            for b in layout.buckets
        ]
        self._reports: list[Report] = []
        self._ends = False
        self.counts = False
        """Whether the next batch is one of training, whose rows count for the hot set."""

    def report(self, bad: torch.Tensor, describe: Callable[[], str]) -> None:
        """Makes the next batch an error on all ranks if it is bad on this one.

        Args:
            bad: 0-dim bool tensor; stays on its device.
            describe: gives the error message, if it comes to that.
        """
        self._reports.append((bad, describe))

    def report_end_of_data(self) -> None:
        """The next batch only stands in for one that this rank does not have."""
        self._ends = True

    def forward(  # type: ignore[override]
        self, features: KeyedJaggedTensor
    ) -> "InputAwaitable":
        """Sends the ids of a batch in canonical form."""
        reports, self._reports = self._reports, []
        end_of_data, self._ends = self._ends, False
        ids_per_slot = features.length_per_key()
        with stage("keys"):
            keys_N, bad = self.keys.keys(features.values(), ids_per_slot)
        with stage("dedup"):
            unique = self._dedup(keys_N, None if self.hot is None else self.hot.index)
        with stage("route"):
            routed = Route(self.layout, unique)

        context = FusedShardingContext(
            batch_size_per_feature_pre_a2a=features.stride_per_key(),
            variable_batch_per_feature=features.variable_stride_per_key(),
            features_before_input_dist=features,
            weights_N=features.weights_or_none() if self._weighted else None,
            ids_per_bucket=[
                sum(ids_per_slot[b.first_slot : b.end_slot]) for b in self.layout.buckets
            ],
            hot=None if self.hot is None else self.hot.batch(),
        )
        reports.append((bad, partial(self.keys.describe_bad_ids, features.values(), ids_per_slot)))
        batch = _Batch(self, context, routed, reports, end_of_data)
        asks_first = self.hot is not None and self.hot.options.hot_batches
        with stage("ids"):
            awaitable = AllHotAwaitable(batch) if asks_first else HeaderAwaitable(batch)
        with stage("bags"):  # while the ids travel
            for bucket, (row_N, grouping), mean_S in zip(
                self.layout.buckets,
                rows_of_buckets(unique, routed.counts_KO, context.ids_per_bucket),
                self._mean_per_bucket,
                strict=True,
            ):
                context.bags.append(
                    pooled_bags(features, bucket, row_N, mean_S, grouping)
                    if self._pooled
                    else sequence_bags(row_N, grouping)
                )
        if self.hot is not None and self.counts and not end_of_data:
            self.hot.count(unique.keys_U)
        return awaitable


def rows_of_buckets(
    unique: Unique, counts_KO: torch.Tensor, ids_per_bucket: list[int]
) -> Iterator[tuple[torch.Tensor, Grouping | None]]:
    """For the ids of each bucket, their rows in its matrix, and the ids of each of these rows."""
    if len(ids_per_bucket) == 1:
        yield unique.inverse_N, unique.grouping
        return
    counts_K = counts_KO.sum(1)
    first_row_K = counts_K.cumsum(0) - counts_K
    first_id = 0
    for ids, first_row in zip(ids_per_bucket, first_row_K, strict=True):
        own = slice(first_id, first_id + ids)
        grouping = unique.grouping
        if grouping is not None:
            # Of static shape: there are at most as many rows as ids.
            rows = first_row + torch.arange(ids + 1, device=first_row.device)
            starts_U1 = grouping.starts_U1.index_select(
                0, rows.clamp_(max=grouping.starts_U1.numel() - 1)
            )
            grouping = Grouping(grouping.order_N[own] - first_id, starts_U1 - first_id)
        yield unique.inverse_N[own] - first_row.int(), grouping
        first_id += ids


class _Batch:
    """A batch on its way."""

    def __init__(
        self,
        input_dist: FusedInputDist,
        context: FusedShardingContext,
        routed: Route,
        reports: list[Report],
        end_of_data: bool,
    ) -> None:
        self.input_dist = input_dist
        self.context = context
        self.routed = routed
        self._reports = reports
        bad = [report for report, _ in reports]
        self.status = bad[0] if len(bad) == 1 else torch.stack(bad).any()
        if end_of_data:
            self.status = torch.full_like(self.status, END_OF_DATA, dtype=torch.int32)
        hot = input_dist.hot
        self.stale = hot is not None and hot.is_stale()

    @property
    def hot_counts_K(self) -> torch.Tensor:
        """Hot rows of each bucket; of no bucket if there are none."""
        ranks = self.input_dist.layout.world_size
        return self.routed.counts_KO[:, ranks:].flatten()

    def arrived(
        self, counts_out: list[list[int]], hot_counts: list[list[int]], stale: bool
    ) -> None:
        """What all ranks know now.

        Args:
            counts_out: [owner][bucket] rows of the batch.
            hot_counts: [rank][bucket] hot rows of the ranks' batches.
            stale: whether replicas must be loaded anew.
        """
        self.context.counts_out = counts_out
        hot = self.context.hot
        if hot is not None:
            hot.counts, hot.stale = hot_counts, stale
            hot.rows.used.rows += sum(map(sum, counts_out))
            hot.rows.used.hot += sum(counts_out[-1])
            hot.slots = self.routed.slots(counts_out)

    def fail(self, failed: list[int]) -> None:
        """Raises on all ranks that hear of bad input; ranks are numbered within them."""
        message = next((describe() for bad, describe in self._reports if bool(bad)), None)
        group = self.input_dist.everyone or self.input_dist.pg
        raise_on_all_ranks(group, failed, message, self.routed.counts_KO.device)


class InputAwaitable(Awaitable[Awaitable[ReceivedRows]]):
    """A batch that has been sent off."""

    def __init__(self, batch: _Batch) -> None:
        super().__init__()
        self._batch = batch
        self.context = batch.context

    def _wait_impl(self) -> Awaitable[ReceivedRows]:
        with stage("ids"):
            return self._receive()

    def _receive(self) -> Awaitable[ReceivedRows]:
        raise NotImplementedError


class AllHotAwaitable(InputAwaitable):
    """Asks all ranks whether any batch has rows that are not hot; if none has, nothing is sent.

    FAE's hot batches.  Whatever else there is to say is left to the messages.
    """

    def __init__(self, batch: _Batch) -> None:
        super().__init__(batch)
        counts_KW = batch.routed.counts_KW
        words = [
            batch.status,
            counts_KW.any(),
            counts_KW.new_full((), batch.stale),  # filled on the device: no copy to wait for
            *batch.hot_counts_K,
        ]
        own = torch.stack([word.int() for word in words])
        pg = batch.input_dist.pg
        self._words = own.new_empty(pg.size() * own.numel())
        # Not an all-reduce: gloo takes three times as long for one.
        self._work = dist.all_gather_single(self._words, own, group=pg, async_op=True)

    def _receive(self) -> Awaitable[ReceivedRows]:
        batch, layout = self._batch, self._batch.input_dist.layout
        wait(self._work, batch.input_dist.pg, "ids")
        words = self._words.view(layout.world_size, -1).tolist()
        check_end_of_data([row[0] for row in words])
        if any(failed or needs_owners for failed, needs_owners, *_ in words):
            return _Messages(HeaderAwaitable(batch))
        assert batch.context.hot is not None
        batch.context.hot.needs_owners = False
        nothing = [[0] * len(layout.buckets) for _ in range(layout.world_size)]
        batch.context.counts_in = nothing
        hot_counts = [row[3:] for row in words]
        batch.arrived(
            [*nothing, hot_counts[batch.input_dist.pg.rank()]],
            hot_counts,
            stale=any(row[2] for row in words),
        )
        rows_R = torch.empty(0, dtype=torch.int32, device=self._words.device)
        return NoWait(ReceivedRows(rows_R, nothing, batch.context.hot))


class _Messages(Awaitable[ReceivedRows]):
    """Messages that were sent when TorchRec expected them to have arrived."""

    def __init__(self, header: "HeaderAwaitable") -> None:
        super().__init__()
        self._header = header

    def _wait_impl(self) -> ReceivedRows:
        return self._header.wait().wait()


class _Statuses:
    """The status words of all ranks, of other groups, too; on their way."""

    def __init__(self, everyone: dist.ProcessGroup, status: torch.Tensor) -> None:
        self._everyone = everyone
        self._own = status.int().view(1)
        self._found = self._own.new_empty(everyone.size())
        self._work = dist.all_gather_single(self._found, self._own, group=everyone, async_op=True)

    def wait(self) -> torch.Tensor:
        wait(self._work, self._everyone, "ids")
        return self._found


class HeaderAwaitable(InputAwaitable):
    """The first (and, unless it overflows, only) round: sends on construction."""

    def __init__(self, batch: _Batch) -> None:
        super().__init__(batch)
        input_dist = batch.input_dist
        self._input_dist = input_dist
        self._routed = batch.routed
        self._buckets = len(input_dist.layout.buckets)
        self._header = COUNTS + self._buckets
        if input_dist.hot is not None:
            self._header += 1 + self._buckets
        self._capacity = input_dist.capacity.current
        self._everyone = None
        if input_dist.everyone is not None:
            self._everyone = _Statuses(input_dist.everyone, batch.status)
        send = self._messages(batch.status)
        self._received = torch.empty_like(send)
        self._work = dist.all_to_all_single(
            self._received, send, group=input_dist.pg, async_op=True
        )
        self._send = send  # kept alive until the exchange is done

    def _messages(self, status: torch.Tensor) -> torch.Tensor:
        """[W, header + capacity] int32; headers last, rows that do not fit may run over them."""
        ranks, width = self._input_dist.layout.world_size, self._header + self._capacity
        flat = self._routed.counts_KO.new_empty(ranks * width + 1, dtype=torch.int32)
        if self._capacity:
            self._routed.pack(flat, self._header)
        messages = flat[:-1].view(ranks, width)
        messages[:, : self._header] = self._headers(status)
        return messages

    def _headers(self, status: torch.Tensor) -> torch.Tensor:
        counts_WK, capacity = self._routed.counts_KW.t(), self._input_dist.capacity
        hot_K = self._batch.hot_counts_K
        if status.device.type == "cpu":  # numbers are cheaper than tensors, and at hand
            counts = counts_WK.tolist()
            most = max(map(sum, counts))
            words = [int(status), min(capacity.wanted(most), INT32_MAX), int(most > self._capacity)]
            last = [int(self._batch.stale), *hot_K.tolist()] if hot_K.numel() else []
            return torch.tensor([words + row + last for row in counts], dtype=torch.int32)
        largest = counts_WK.sum(1).max()
        wanted = capacity.wanted(largest).clamp(max=INT32_MAX)
        parts = [status, wanted, largest > self._capacity]
        same = torch.stack([part.to(counts_WK.dtype) for part in parts])
        columns = [same.expand(counts_WK.size(0), -1), counts_WK]
        if hot_K.numel():
            stale = hot_K.new_full((1,), int(self._batch.stale))
            columns.append(torch.cat([stale, hot_K]).expand(counts_WK.size(0), -1))
        return torch.cat(columns, dim=1)

    def _receive(self) -> Awaitable[ReceivedRows]:
        wait(self._work, self._input_dist.pg, "ids")
        ranks, buckets = self._received.size(0), self._buckets
        header_W = self._received[:, : self._header]
        counts_OK = self._routed.counts_KO.t().to(header_W.dtype)
        statuses = header_W[:, STATUS] if self._everyone is None else self._everyone.wait()
        # The one host synchronisation of the exchange: what came in, and what went out.
        words = torch.cat([header_W.flatten(), counts_OK.flatten(), statuses]).tolist()
        rows = [words[r * self._header : (r + 1) * self._header] for r in range(ranks)]
        self._input_dist.capacity.update(max(row[WANTED] for row in rows))
        words, failures = words[: -statuses.numel()], words[-statuses.numel() :]
        failed = [rank for rank, status in enumerate(failures) if status == BAD]
        if failed:
            self._batch.fail(failed)
        check_end_of_data(failures)
        out = words[ranks * self._header :]
        self.context.counts_in = [row[COUNTS : COUNTS + buckets] for row in rows]
        hot_words = [row[COUNTS + buckets :] for row in rows]
        self._batch.arrived(
            [out[i : i + buckets] for i in range(0, len(out), buckets)],
            hot_counts=[word[1:] for word in hot_words],
            stale=any(word[0] for word in hot_words if word),
        )
        if any(row[OVERFLOW] for row in rows):
            return ExactAwaitable(self._input_dist.pg, self._routed, self.context)
        return NoWait(ReceivedRows(self._compact(), self.context.counts_in, self.context.hot))

    def _compact(self) -> torch.Tensor:
        """The rows of all messages, without headers and padding."""
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


def check_end_of_data(statuses: list[int]) -> None:
    """
    Raises:
        ValueError: some ranks have no batch for this step, but others have.
    """
    ended = [rank for rank, status in enumerate(statuses) if status == END_OF_DATA]
    if not ended or len(ended) == len(statuses):
        return
    others = [rank for rank in range(len(statuses)) if rank not in ended]
    raise ValueError(
        f"{listed_ranks(ended)} ran out of batches, {listed_ranks(others)} did not: all ranks must "
        "have the same number of batches. Leave the last ones out, or give a rank that has no more "
        "of them batches of no samples"
    )


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
        return ReceivedRows(self._rows, self._context.counts_in, self._context.hot)
