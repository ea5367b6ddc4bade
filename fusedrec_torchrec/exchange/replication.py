"""Rows that live on several ranks, as the exchange sees them.

The exchange does not know which rows these are, why, or how their copies stay equal.  It asks for
an *index*, by which keys of such rows become keys of this rank's replicas, for an object that takes
care of the replicated rows of one *batch*, and for the lookup of rows whose updates are shared.  It
says when the tables are about to be read or overwritten.  Hot rows and the shared updates of 2D
parallelism are such replications.
"""

from abc import abstractmethod
from collections.abc import Sequence
from typing import Protocol

import torch
from torchrec.streamable import Multistreamable

from fusedrec_torchrec.exchange.asked import Asked

__all__ = ["BatchReplicas", "ReplicaIndex", "Replication", "Replications"]


class ReplicaIndex(Protocol):
    """Turns the key of a row into the key of its replica on this rank."""

    table: torch.Tensor | None
    """The same as a hash table for the C++ operator; None where it is not used."""

    def replace(self, keys_N: torch.Tensor) -> torch.Tensor:
        """Returns the keys, those of replicated rows replaced by the keys of their replicas."""
        ...


class BatchReplicas(Multistreamable):
    """The replicated rows of one batch, from input dist to backward.

    Attributes:
        needs_owners: whether any rank's batch has rows that are not replicated; all ranks know it.
    """

    needs_owners: bool

    @abstractmethod
    def routed(
        self,
        places: list[torch.Tensor],
        counts: list[list[int]],
        stale: bool,
        rows: int,
        needs_owners: bool,
    ) -> None:
        """Takes what the messages of all ranks have told.

        Args:
            places: the places of each bucket's replica that the batch uses, each once.
            counts: [rank][bucket] how many places each rank uses.
            stale: whether some rank's replicas are older than the tables.
            rows: how many rows the batch uses, replicated or not.
            needs_owners: see above.
        """

    def routed_as(self, earlier: "BatchReplicas") -> bool:
        """Returns whether the same rows are replicated as for an earlier batch; all ranks know."""
        return False

    @abstractmethod
    def enter(self) -> None:
        """Makes the replicas those that the batch was routed by, before its lookup."""

    @abstractmethod
    def look_up(self, out: torch.Tensor) -> None:
        """Writes the rows of the places, bucket after bucket, into a flat buffer."""

    @abstractmethod
    def send_gradients(self, flat: torch.Tensor) -> None:
        """Starts the sync of the gradients of what ``look_up`` gave."""


class Replication:
    """Something that replicates rows of a module's fused tables; this one replicates none."""

    name = "none"
    """What the state of this replication is called in checkpoints."""

    index: ReplicaIndex | None = None
    """The index that routes the next batch; None if no keys are answered by replicas."""

    asks_first = False
    """Whether ranks ask each other first if a batch needs any owner at all."""

    shares_updates = False
    """Whether it looks rows up itself, to update them together with other ranks."""

    def batch(self) -> BatchReplicas | None:
        """Returns what takes care of the replicated rows of a batch that is about to be routed."""
        return None

    def is_stale(self) -> bool:
        """Returns whether this rank's tables know better than the replicas."""
        return False

    def count(self, keys_U: torch.Tensor | None) -> None:
        """Takes the unique keys of a batch of training; None if this rank has no batch.

        Ranks that have one may need an answer from this rank all the same.
        """

    def forget(self) -> None:
        """Forgets what was counted, after an error that all ranks have raised in the same step."""

    def look_up(self, asked: Sequence[Asked]) -> list[torch.Tensor] | None:
        """Looks up what is asked of each bucket whose updates are shared; None if none are."""
        return None

    def flush(self) -> None:
        """Brings the tables up to date: somebody is about to read them."""

    def purge(self) -> None:
        """Makes the tables count, not the replicas: they are about to be overwritten."""

    def state(self) -> dict[str, torch.Tensor]:
        """Returns what must be saved with a checkpoint, beside the tables."""
        return {}

    def load(self, states: Sequence[dict[str, torch.Tensor]], own: bool) -> None:
        """Takes over what was saved.

        Args:
            states: of this rank, or of several.
            own: whether it is this rank's own.
        """


class Replications:
    """All replications of the same tables, as the exchange uses them.

    At most one of them may answer keys, and at most one may share updates.
    """

    def __init__(self, members: Sequence[Replication] = ()) -> None:
        self.members = tuple(members)
        answering = [member for member in members if member.index is not None]
        assert len(answering) <= 1, "two replications answer the same keys"
        self._answers = answering[0] if answering else Replication()

    @property
    def index(self) -> ReplicaIndex | None:
        """The index that routes the next batch; None if no keys are answered by replicas."""
        return self._answers.index

    @property
    def asks_first(self) -> bool:
        """Whether ranks ask each other first if a batch needs any owner at all."""
        return self._answers.asks_first

    @property
    def shares_updates(self) -> bool:
        """Whether one of them looks rows up itself."""
        return any(member.shares_updates for member in self.members)

    def batch(self) -> BatchReplicas | None:
        """Returns what takes care of the replicated rows of a batch that is about to be routed."""
        return self._answers.batch()

    def is_stale(self) -> bool:
        """Returns whether this rank's tables know better than the replicas."""
        return self._answers.is_stale()

    def count(self, keys_U: torch.Tensor | None) -> None:
        """Takes the unique keys of a batch of training; None if this rank has no batch."""
        self._answers.count(keys_U)

    def look_up(self, asked: Sequence[Asked]) -> list[torch.Tensor] | None:
        """Looks up what is asked of each bucket whose updates are shared; None if none are."""
        for member in self.members:
            looked_up = member.look_up(asked)
            if looked_up is not None:
                return looked_up
        return None

    def flush(self) -> None:
        """Brings the tables up to date: somebody is about to read them."""
        for member in self.members:
            member.flush()

    def purge(self) -> None:
        """Makes the tables count, not the replicas: they are about to be overwritten."""
        for member in self.members:
            member.purge()
