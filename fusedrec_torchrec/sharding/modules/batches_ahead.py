"""Ranks of a training pipeline that have different numbers of batches.

A pipeline sends the ids of the next batch before it looks up the current one.  A rank that has no
next batch sends nothing, and others would wait for its ids.  So the modules of a model count how
many batches are ahead of the one that is looked up.  When there are fewer than before, or none in
the first step of a pipeline, this rank's data has come to an end, and in place of ids it sends
messages that say so.  If all ranks say so, the epoch is over.  If not, all raise the same error:
those that have a batch when they read its headers, the others when the rows of their last batch
have arrived.  Up to there all ranks have called the same collectives.

A plain loop has no batches ahead, and sends no such messages: a rank that has fewer batches than
others is one that does not answer.  So it is in pipelines that look up no batch after the last one
was read (``execute_all_batches=False``) or never have a batch ahead
(``TrainPipelineSparseDistLite``), for modules that other sharders have sharded, and for a single
batch where it does not look like one: ``EvalPipelineSparseDist`` sends the first one twice, and
with hot batches ids of the first step are sent after those of the second.
"""

import weakref
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

from torchrec.distributed.types import Awaitable

__all__ = ["BatchesAhead"]

Module = TypeVar("Module")
W = TypeVar("W")


class _Counts(Generic[Module]):
    """Batches of one module.

    Attributes:
        sent: batches whose ids were sent.
        used: batches that were looked up.
        level: batches that were ahead when the last step of the epoch began; None before the
            first one.
        pipelined: whether the last batch came from a pipeline.
        was_single: whether the last epoch of a pipeline never had a batch ahead.
    """

    def __init__(self, module: Module) -> None:
        self.module = weakref.ref(module)
        self.sent = self.used = 0
        self.level: int | None = None
        self.pipelined = True
        self.was_single = False

    @property
    def ahead(self) -> int:
        """Batches behind the one that is to be looked up next.

        Batches that were sent and never looked up count for ever, on all ranks alike: only
        changes mean something.
        """
        return self.sent - self.used - 1

    def has_ended(self) -> bool:
        """Returns whether fewer batches are ahead than there should be; called once a step."""
        if self.sent == self.used:  # called later in the step, in the plain way, or not at all
            return False
        expected = self.level
        if expected is None:  # the first step of an epoch
            single = self.pipelined and self.ahead == 0
            expected = int(single and not self.was_single)
            self.was_single = single
        self.level = self.ahead
        return self.ahead < expected


class BatchesAhead(Generic[Module]):
    """Counts batches of the modules of a model.

    Modules are known by numbers, which all ranks give them in the same order.  What this object
    decides must not depend on when a rank collects the garbage of an earlier model.

    Args:
        send_end_of_data: sends messages without ids for modules; whoever waits for them hears of
            ranks that have some.
    """

    def __init__(self, send_end_of_data: Callable[[Sequence[Module]], Awaitable[None]]) -> None:
        self._send_end_of_data = send_end_of_data
        self._numbers: weakref.WeakKeyDictionary[Module, int] = weakref.WeakKeyDictionary()
        self._counts: dict[int, _Counts[Module]] = {}
        # Modules in the order in which the last batch was sent: the order that all ranks keep.
        self._sent_order: list[int] = []
        self._used_in_step: set[int] = set()
        self._still_to_use: set[int] = set()
        self._pending: list[Awaitable[None]] = []

    @property
    def has_begun(self) -> bool:
        """Whether any batch was sent."""
        return bool(self._counts)

    def sent(self, module: Module) -> None:
        """Notes that a module is about to send the ids of a batch.

        Raises:
            ValueError: as ``_settle``.
        """
        if module not in self._numbers:
            self._numbers[module] = len(self._counts)
            self._counts[self._numbers[module]] = _Counts(module)
        number = self._numbers[module]
        if number not in self._still_to_use:  # else it is of the step that is under way
            self._settle()
        counts = self._counts[number]
        if counts.sent == counts.used:
            counts.level = None
        counts.sent += 1
        counts.pipelined = True
        if number in self._sent_order:
            self._sent_order = []
        self._sent_order.append(number)

    def watch_request(self, module: Module, request: Awaitable[W]) -> Awaitable[W]:
        """Notes whether a request of ids is waited for as a whole, as no pipeline does."""
        counts = self._counts[self._numbers[module]]

        def waited_for(result: W) -> W:
            counts.pipelined = False
            return result

        request.callbacks.append(waited_for)
        return request

    def used(self, module: Module) -> None:
        """Notes that a module is about to look up the oldest batch that it has sent the ids of."""
        number = self._numbers[module]
        begins = number in self._used_in_step or self._used_in_step.isdisjoint(self._sent_order)
        if begins:
            before, self._used_in_step = self._used_in_step, set()
            self._begin_step(before)
        self._used_in_step.add(number)
        self._still_to_use.discard(number)
        self._counts[number].used += 1

    def _begin_step(self, used_before: set[int]) -> None:
        """Looks, before the first lookup of a step, whether the data of any module has ended.

        Args:
            used_before: modules that the last step looked up; this one will, too.
        """
        sent = set(self._sent_order)
        self._still_to_use = used_before & sent if used_before else sent
        ended = [n for n in self._sent_order if self._counts[n].has_ended()]
        modules = [self._counts[number].module() for number in ended]
        alive = [module for module in modules if module is not None]
        if alive:
            self._pending.append(self._send_end_of_data(alive))

    def watch_output(self, output: Awaitable[W]) -> Awaitable[W]:
        """Hears what other ranks say when the output is there, if they have something to say.

        Waiting for the output then raises as ``_settle`` does.
        """
        if self._pending:
            output.callbacks.append(self._arrived)
        return output

    def _arrived(self, result: W) -> W:
        if not self._still_to_use:  # else other ranks still wait for rows of other modules
            self._settle()
        return result

    def _settle(self) -> None:
        """Waits for what other ranks say.

        Raises:
            ValueError: on all ranks: some of them still have batches.
        """
        pending, self._pending = self._pending, []
        for message in pending:
            message.wait()
