"""One update for the replicas of a row: with the gradients of all groups.

So 2D training is training without groups; what differs is who sends what to whom.  The replicas of
a shard are to each other what hot rows are on the ranks of a group, so their gradients travel in
the same way (``replicas.sync``): sent in backward, awaited before the next lookup, by touched rows
or by an all-reduce over all rows, whatever is fewer bytes.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torchrec.distributed.comm_ops import get_gradient_division

from fusedrec_torchrec.codecs.options import CodecOptions
from fusedrec_torchrec.compat.bucket_table import BucketKernel, OptimizerSettings
from fusedrec_torchrec.core.lost_rank import wait
from fusedrec_torchrec.core.transfer import ToHost, to_device
from fusedrec_torchrec.exchange.asked import Asked
from fusedrec_torchrec.exchange.replication import Replication
from fusedrec_torchrec.replicas.replica import Replica, check_replicable
from fusedrec_torchrec.replicas.sync import GradientSync

__all__ = ["SharedUpdates"]

logger = logging.getLogger(__name__)


class WholeTable(Replica):
    """All rows of a bucket on this rank, as a replica of those of other groups."""

    _made_for: object = None  # settings that the update was made for, but for the learning rate

    def __init__(self, kernel: BucketKernel) -> None:
        super().__init__(kernel, kernel.table, kernel.table.rows)

    def update(
        self, places: torch.Tensor, gradients: torch.Tensor, settings: OptimizerSettings
    ) -> None:
        """Does one step of the optimizer, with its settings as of the backward pass.

        The table may have others by now, of the next step, and gets them back.
        """
        now = self.settings()
        self._settings = now if self._made_for == now.others else None
        super().update(places, gradients, settings)
        self._made_for = settings.others
        if now != settings:
            self.kernel.table.optimizer_settings = now


@dataclass
class _Lookup:
    """A lookup that waits for its gradients.

    Attributes:
        asked: of each bucket.
        rows: of each bucket, each once unless the optimizer clips.
        inverse: of each bucket, where each row that is asked for is among them; None if in its
            place.
        counts: [replica][bucket] of ``rows``, on their way from the others and to the host.
    """

    asked: Sequence[Asked]
    rows: list[torch.Tensor]
    inverse: list[torch.Tensor | None]
    counts: "_Counts"


class _Counts:
    """Numbers of rows of all replicas, on their way.

    On CUDA they go on to the host on a stream of their own, so that backward finds them there and
    nothing of the forward pass waits for other groups.

    Args:
        pg: the replicas.
        own: what this one has counted.
        stream: for the copy to the host; None on CPU.
    """

    def __init__(
        self, pg: dist.ProcessGroup, own: torch.Tensor, stream: torch.cuda.Stream | None
    ) -> None:
        self._pg = pg
        self._own = own
        self._gathered = own.new_empty(pg.size() * own.numel())
        self._work: dist.Work | None = dist.all_gather_single(
            self._gathered, own, group=pg, async_op=True
        )
        self._on_host: ToHost | None = None
        if stream is not None:
            with torch.cuda.stream(stream):
                self._wait()
                self._on_host = ToHost(self._gathered)
            # There may be no backward that looks at them, and then nobody else waits for the
            # collective, which reads the one and writes the other.
            self._own.record_stream(stream)
            self._gathered.record_stream(stream)

    def _wait(self) -> None:
        if self._work is not None:
            wait(self._work, self._pg, "2D sync")
            self._work = None

    def rows(self) -> list[list[int]]:
        """Returns [replica][bucket] how many rows there are."""
        self._wait()
        if self._on_host is None:
            self._on_host = ToHost(self._gathered)
        numbers, buckets = self._on_host.numbers(), self._own.numel()
        return [numbers[i : i + buckets] for i in range(0, len(numbers), buckets)]


class SharedUpdates(Replication):
    """Lookups of a module's fused tables whose gradients are shared with the other groups.

    Args:
        pg: the replicas of this rank's shards.
        kernels: the buckets' tables on this rank.
        duplicates: whether a row may come more than once in a lookup.
        codec: how gradients travel; None if as they are.
    """

    def __init__(
        self,
        pg: dist.ProcessGroup,
        kernels: Sequence[BucketKernel],
        duplicates: bool,
        codec: CodecOptions | None = None,
    ) -> None:
        for kernel in kernels:
            check_replicable(kernel, "sync is 'gradients'")
        self._pg = pg
        self._kernels = kernels
        self._duplicates = duplicates
        self._replicas = [WholeTable(kernel) for kernel in kernels]
        self._sync = GradientSync(pg, self._replicas, stage="2D sync", codec=codec)
        device = self._replicas[0].tensors[0].device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._anchor = torch.zeros((), device=device, requires_grad=True)
        for kernel in kernels:
            kernel.optimizer.register_state_hook(self.finish)

    name = "grid"
    shares_updates = True

    def finish(self) -> None:
        """Updates the tables with the last step's gradients; without a word to others."""
        self._sync.finish()

    def flush(self) -> None:
        self.finish()

    def purge(self) -> None:
        self.finish()

    def state(self) -> dict[str, torch.Tensor]:
        """Returns the state of this rank's codecs: thresholds, and what is left of gradients."""
        coded = self._sync.coded
        if coded is None:
            return {}
        self.finish()
        return coded.thresholds() | {f"{k}.left": left for k, left in enumerate(coded.left)}

    def load(self, states: Sequence[dict[str, torch.Tensor]], own: bool) -> None:
        """Takes over the state of this rank; of other shards, thresholds only."""
        coded = self._sync.coded
        if coded is None:
            return
        coded.load_thresholds(states)
        for k, left in enumerate(coded.left):
            left_before = [s[f"{k}.left"] for s in states if f"{k}.left" in s]
            if own and left_before and left_before[0].shape == left.shape:
                left.copy_(left_before[0])
            else:
                left.zero_()
                if left_before:
                    logger.warning(
                        "what codecs had left of gradients between groups is lost: the tables are "
                        "sharded in another way than in the checkpoint"
                    )

    def look_up(self, asked: Sequence[Asked]) -> list[torch.Tensor]:
        """Looks up what is asked of each bucket, [units, columns], and shares the update."""
        self.finish()
        if not torch.is_grad_enabled():
            return self.values(asked)
        return list(_LookUp.apply(self._anchor, self, self._begin(asked)))

    def _begin(self, asked: Sequence[Asked]) -> _Lookup:
        """Tells the other groups how many rows will get gradients."""
        distinct: list[torch.Tensor] = []
        inverse: list[torch.Tensor | None] = []
        for bucket, replica in zip(asked, self._replicas, strict=True):
            # The same row can be in several bags of one rank.
            duplicates = self._duplicates or bucket.lengths_U is not None
            if duplicates and not replica.clips:
                rows_U, inverse_R = bucket.rows_R.unique(return_inverse=True)
                distinct.append(rows_U)
                inverse.append(inverse_R)
            else:
                distinct.append(bucket.rows_R)
                inverse.append(None)
        own = to_device([rows.numel() for rows in distinct], asked[0].rows_R.device)
        return _Lookup(asked, distinct, inverse, _Counts(self._pg, own, self._stream))

    def values(self, asked: Sequence[Asked]) -> list[torch.Tensor]:
        """Looks up without a gradient."""
        with torch.no_grad():
            return [
                kernel(bucket.rows_R, bucket.offsets_U1, bucket.weights_R)
                for kernel, bucket in zip(self._kernels, asked, strict=True)
            ]

    def send(self, lookup: _Lookup, gradients: Sequence[torch.Tensor]) -> None:
        """Starts the sync of a lookup's gradients."""
        # Groups divide by the number of their ranks; the mean is over all ranks.
        factor = 1 / self._pg.size() if get_gradient_division() else 1.0
        gradients = [
            bucket.row_gradients(gradient)
            for bucket, gradient in zip(lookup.asked, gradients, strict=True)
        ]
        summed = [
            gradient.contiguous() * factor
            if inverse is None
            else gradient.new_zeros(rows.numel(), gradient.size(1)).index_add_(
                0, inverse, gradient, alpha=factor
            )
            for rows, inverse, gradient in zip(lookup.rows, lookup.inverse, gradients, strict=True)
        ]
        rows = [rows.int() for rows in lookup.rows]
        self._sync.start(rows, summed, lookup.counts.rows(), all_to_all=True)


class _LookUp(torch.autograd.Function):
    """Rows out, gradients to ``SharedUpdates``; the anchor is there to be differentiated."""

    @staticmethod
    def forward(
        ctx: Any,
        anchor: torch.Tensor,
        shared: SharedUpdates,
        lookup: _Lookup,
    ) -> tuple[torch.Tensor, ...]:
        ctx.shared, ctx.lookup = shared, lookup
        return tuple(shared.values(lookup.asked))

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[None, ...]:
        ctx.shared.send(ctx.lookup, gradients)
        return (None,) * 3
