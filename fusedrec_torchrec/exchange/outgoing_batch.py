"""A batch on its way from the requester to the owners."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
import torch.distributed as dist
from torchrec.distributed.types import Awaitable

from fusedrec_torchrec.core.all_ranks import raise_bad_input
from fusedrec_torchrec.core.stages import stage
from fusedrec_torchrec.exchange.capacity import Capacity
from fusedrec_torchrec.exchange.cargo import Cargo
from fusedrec_torchrec.exchange.checks import Report
from fusedrec_torchrec.exchange.context import FusedShardingContext, ReceivedRows
from fusedrec_torchrec.exchange.replication import Replications
from fusedrec_torchrec.exchange.statuses import END_OF_DATA, describe_uneven, is_uneven

__all__ = ["BatchNotes", "IdExchange", "InputAwaitable", "OutgoingBatch", "ReceivedOnce"]


@dataclass(frozen=True)
class BatchNotes:
    """What there is to know about a batch beside its features.

    Attributes:
        training: whether it is a batch of training, whose rows count for replication.
        end_of_data: whether it only stands in for a batch that this rank does not have.
        on_uneven: called before the error is raised that only some ranks have a batch.
        reports: what may be wrong with it: a 0-dim bool tensor that stays on its device, and what
            gives the error message, if it comes to that.
        refused: the one of its lengths; None if there is none.
    """

    training: bool = False
    end_of_data: bool = False
    on_uneven: Callable[[], None] | None = None
    reports: Sequence[Report] = ()
    refused: torch.Tensor | None = None


@dataclass(frozen=True)
class IdExchange:
    """What the messages of all batches of a module have in common.

    Attributes:
        pg: the ranks that tables are sharded over.
        everyone: all ranks that must hear of bad input; ``pg`` if None.
        ranks: how many these are.
        capacity: the room of messages.
        replication: rows that live on several ranks.
    """

    pg: dist.ProcessGroup
    everyone: dist.ProcessGroup | None
    ranks: int
    capacity: Capacity
    replication: Replications


class OutgoingBatch:
    """A batch on its way.

    Args:
        exchange: of its module.
        context: what this rank remembers of it.
        cargo: what it sends.
        notes: what else there is to know about it.
        reports: all that may be wrong with it.

    Attributes:
        statuses: what this rank says about it, the largest of which counts.
    """

    def __init__(
        self,
        exchange: IdExchange,
        context: FusedShardingContext,
        cargo: Cargo,
        notes: BatchNotes,
        reports: Sequence[Report],
    ) -> None:
        self.exchange = exchange
        self.context = context
        self.cargo = cargo
        self._notes = notes
        self._reports = reports
        self.statuses = [report for report, _ in reports]
        if notes.end_of_data:
            self.statuses = [torch.full_like(self.statuses[0], END_OF_DATA, dtype=torch.int32)]
        self.stale = exchange.replication.is_stale()

    @cached_property
    def status(self) -> torch.Tensor:
        """All statuses in one."""
        return self.statuses[0] if len(self.statuses) == 1 else torch.stack(self.statuses).any()

    def arrived(
        self,
        counts_out: list[list[int]],
        replica_counts: list[list[int]],
        stale: bool,
        needs_owners: bool = True,
    ) -> None:
        """Takes what all ranks know now.

        Args:
            counts_out: [owner][bucket] units of the batch.
            replica_counts: [rank][bucket whose rows travel] replicated rows of the ranks' batches.
            stale: whether replicas must be loaded anew.
            needs_owners: whether any rank's batch asks owners for anything.
        """
        self.context.counts_out = counts_out
        if self.context.replicas is not None:
            assert self.cargo.rows is not None
            places = self.cargo.rows.places(counts_out)
            rows = sum(map(sum, counts_out))
            self.context.replicas.routed(places, replica_counts, stale, rows, needs_owners)

    def fail(self, failed: list[int]) -> None:
        """Raises on all ranks that hear of bad input; ranks are numbered within them."""
        message = next((describe() for bad, describe in self._reports if bool(bad)), None)
        group = self.exchange.everyone or self.exchange.pg
        raise_bad_input(group, failed, message, self.cargo.counts_KO.device)

    def check_end_of_data(self, statuses: list[int]) -> None:
        """Refuses a step that only some ranks have a batch for.

        Raises:
            ValueError: on all ranks, naming those that have none.
        """
        if is_uneven(statuses):
            if self._notes.on_uneven is not None:
                self._notes.on_uneven()
            raise ValueError(describe_uneven(statuses))


class InputAwaitable(Awaitable[Awaitable[ReceivedRows]]):
    """A batch that has been sent off."""

    def __init__(self, batch: OutgoingBatch) -> None:
        super().__init__()
        self._batch = batch
        self.context = batch.context

    def _wait_impl(self) -> "ReceivedOnce":
        with stage("ids"):
            return ReceivedOnce(self._receive(), self.context)

    def _receive(self) -> Awaitable[ReceivedRows]:
        raise NotImplementedError


class ReceivedOnce(Awaitable[ReceivedRows]):
    """What owners are asked for; it may be waited for again, and is received once.

    Args:
        awaitable: what gives it.
        context: what this rank remembers of the batch.
    """

    def __init__(self, awaitable: Awaitable[ReceivedRows], context: FusedShardingContext) -> None:
        super().__init__()
        self.context = context
        self._awaitable = awaitable
        self._received: ReceivedRows | None = None

    def _wait_impl(self) -> ReceivedRows:
        if self._received is None:
            self._received = self._awaitable.wait()
        return self._received
