"""Ranks of a training pipeline that have different numbers of batches.

A pipeline sends the ids of the next batch before it looks up the current one.  A rank that has no
next batch sends nothing, and what it sends after that would meet the ids of the others.  So the
modules of a model count how many batches are ahead of the one that is looked up.  When there are
fewer than before, this rank's data has come to an end, and in place of the ids that the others may
be sending it sends messages that say so.  If all ranks say so, the epoch is over.  If not, all
raise the same error: those that have a batch when they read its headers, the others when the rows
of their last batch have arrived.  Up to there all ranks have called the same collectives.

A plain loop has no batches ahead, and sends no such messages.  Neither do models with stock tables
that exchange ids: TorchRec has no message to say it with.  Some ends are not noticed, and end in
the timeout of the process group or in an error of gloo: that of a rank with a single batch, which
never was ahead; one in the step in which DistributedDataParallel rebuilds its buckets (the third
of a training), since its broadcast comes before the first lookup; and those of pipelines that look
up no batch after the last one was read (``TrainPipelineSparseDistLite``, and others with
``execute_all_batches=False``).
"""

import weakref
from typing import Protocol

from torchrec.distributed.types import Awaitable

__all__ = ["BatchesAhead", "Member"]


class Member(Protocol):
    """The fused tables of one module."""

    def send_end_of_data(self) -> Awaitable[object]:
        """Sends messages without ids; whoever waits for them hears of ranks that have some."""
        ...


class _Counts:
    """Batches of one module.

    Attributes:
        sent: batches whose ids were sent.
        used: batches that were looked up.
        level: batches that were ahead when the last step began; None before the first one.
    """

    def __init__(self, member: Member) -> None:
        self.member = weakref.ref(member)
        self.sent = self.used = 0
        self.level: int | None = None

    @property
    def ahead(self) -> int:
        """Batches behind the one that is to be looked up next.

        Batches that were sent and never looked up count for ever, on all ranks alike: only
        changes mean something.
        """
        return self.sent - self.used - 1


class BatchesAhead:
    """Counts batches of all modules that one set of sharders has sharded.

    Modules are known by numbers, which all ranks give them in the same order.  What this object
    decides must not depend on when a rank collects the garbage of an earlier model.
    """

    def __init__(self) -> None:
        self._numbers: weakref.WeakKeyDictionary[Member, int] = weakref.WeakKeyDictionary()
        self._counts: dict[int, _Counts] = {}
        # Modules in the order in which the last batch was sent: the order that all ranks keep.
        self._sent_order: list[int] = []
        self._used_in_step: set[int] = set()
        self._still_to_use: set[int] = set()
        self._pending: list[Awaitable[object]] = []
        self._is_active = True

    def deactivate(self) -> None:
        """There are tables whose ids travel in TorchRec's own messages."""
        self._is_active = False

    def sent(self, member: Member) -> None:
        """A module is about to send the ids of a batch.

        Raises:
            ValueError: as ``_settle``.
        """
        if member not in self._numbers:
            self._numbers[member] = len(self._counts)
            self._counts[self._numbers[member]] = _Counts(member)
        number = self._numbers[member]
        if number not in self._still_to_use:  # else it is of the step that is under way
            self._settle()
        self._counts[number].sent += 1
        if number in self._sent_order:
            self._sent_order = []
        self._sent_order.append(number)

    def used(self, member: Member) -> None:
        """A module is about to look up the oldest batch that it has sent the ids of."""
        number = self._numbers[member]
        begins = number in self._used_in_step or self._used_in_step.isdisjoint(self._sent_order)
        if begins:
            before, self._used_in_step = self._used_in_step, set()
            self._begin_step(before)
        self._used_in_step.add(number)
        self._still_to_use.discard(number)
        self._counts[number].used += 1

    def _begin_step(self, used_before: set[int]) -> None:
        """Before the first lookup of a step: have all modules as many batches ahead as before?

        Args:
            used_before: modules that the last step looked up; this one will, too.
        """
        self._still_to_use = used_before.intersection(self._sent_order)
        for number in self._sent_order:
            counts = self._counts[number]
            before, counts.level = counts.level, counts.ahead
            member = counts.member()
            if self._is_active and before is not None and counts.ahead < before and member:
                self._pending.append(member.send_end_of_data())

    def rows_arrived(self) -> None:
        """The rows of a batch are there; other ranks may still wait for those of other modules.

        Raises:
            ValueError: as ``_settle``.
        """
        if self._pending and not self._still_to_use:
            self._settle()

    def _settle(self) -> None:
        """Waits for what other ranks say.

        Raises:
            ValueError: on all ranks: some of them still have batches.
        """
        pending, self._pending = self._pending, []
        for each in pending:
            each.wait()
