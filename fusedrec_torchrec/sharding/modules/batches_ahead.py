"""Ranks of a training pipeline that have different numbers of batches.

A pipeline sends the ids of the next batch before it looks up the current one.  A rank that has no
next batch sends nothing, and others would wait for its ids.  So the modules of a model count how
many batches are ahead of the one that is looked up.  When there are fewer than before, or none in
the first step of a pipeline, this rank's data has come to an end, and in place of ids it sends
messages that say so.  If all ranks say so, the epoch is over.  If not, all raise the same error:
those that have a batch when they read its headers, the others when the rows of their last batch
have arrived.  Up to there all ranks have called the same collectives.

Modules that a pipeline does not know how to feed are called in the plain way in the midst of a
step, and send their ids then.  Others have sent the next batch of the pipelined modules before
that, so the end of data is said before any module is called.

A plain loop has no batches ahead, and sends no such messages: a rank that has fewer batches than
others is one that does not answer.  So it is in pipelines that look up no batch after the last one
was read (``execute_all_batches=False``) or never have a batch ahead
(``TrainPipelineSparseDistLite``), for modules that other sharders have sharded, and for a single
batch where it does not look like one: ``EvalPipelineSparseDist`` sends the first one twice, with
hot batches ids of the first step are sent after those of the second, and an epoch of one batch that
follows another is taken for a pipeline that never has a batch ahead.
"""

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Generic, TypeVar

from torchrec.distributed.types import Awaitable

__all__ = ["BatchesAhead"]

Module = TypeVar("Module")
W = TypeVar("W")


class _Counts(Generic[Module]):
    """Batches of one module that a pipeline feeds.

    Attributes:
        sent: batches whose ids were sent.
        used: batches that were looked up.
        level: batches that were ahead when the last step of the epoch began; None before the
            first one.
        was_single: whether the last epoch of a pipeline never had a batch ahead.
        is_called: whether the module is called in the plain way at the moment.
        is_plain: whether it was so when it was used last.
    """

    def __init__(self, module: Module) -> None:
        self.module = weakref.ref(module)
        self.sent = self.used = 0
        self.level: int | None = None
        self.was_single = False
        self.is_called = self.is_plain = False

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
            single = self.ahead == 0
            expected = int(single and not self.was_single)
            self.was_single = single
        self.level = self.ahead
        return self.ahead < expected

    def forget(self) -> None:
        """Takes all batches that were sent as looked up."""
        self.used, self.level, self.was_single = self.sent, None, False


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
        self._counts: list[_Counts[Module]] = []
        # Modules in the order in which the last batch was sent: the order that all ranks keep.
        self._sent_order: list[int] = []
        self._used_in_step: set[int] = set()
        self._still_to_use: set[int] = set()
        self._sent_since_use = False
        self._pending: list[Awaitable[None]] = []
        self.has_begun = False
        """Whether any batch was sent."""

    def register(self, module: Module) -> None:
        """Takes a module of the model, in the same order on all ranks."""
        self._numbers[module] = len(self._counts)
        self._counts.append(_Counts(module))

    @contextmanager
    def call(self, module: Module) -> Iterator[None]:
        """Surrounds a call of a module in the plain way, which sends ids and looks them up.

        Raises:
            ValueError: as ``_settle``.
        """
        number = self._numbers[module]
        counts = self._counts[number]
        if number not in self._still_to_use:  # else it is of the step that is under way
            self._settle()
        counts.is_called = counts.is_plain = self.has_begun = True
        self._use(number)
        try:
            yield
        finally:
            counts.is_called = False

    def sent(self, module: Module) -> None:
        """Notes that a module is about to send the ids of a batch.

        Raises:
            ValueError: as ``_settle``.
        """
        number = self._numbers[module]
        counts = self._counts[number]
        if counts.is_called:
            return
        self._settle()
        self.has_begun = True
        if counts.sent == counts.used:
            counts.level = None
        counts.sent += 1
        if number in self._sent_order:
            self._sent_order = []
        self._sent_order.append(number)
        self._sent_since_use = True

    def used(self, module: Module) -> None:
        """Notes that a module is about to look up the oldest batch that it has sent the ids of."""
        number = self._numbers[module]
        counts = self._counts[number]
        if not counts.is_called:
            counts.is_plain = False
            self._use(number)
            counts.used += 1
        self._still_to_use.discard(number)

    def _use(self, number: int) -> None:
        """Begins a step with the first of its modules."""
        if self._sent_since_use or number in self._used_in_step or not self._used_in_step:
            before, self._used_in_step = self._used_in_step, set()
            self._begin_step(before)
        self._used_in_step.add(number)

    def _begin_step(self, used_before: set[int]) -> None:
        """Looks, before any module of a step is used, whether the data of one has ended.

        Args:
            used_before: modules that the last step used; this one will, too.
        """
        self._sent_since_use = False
        fed = {n for n in used_before if self._counts[n].is_plain or n in self._sent_order}
        # Of the first step nobody knows, so that all modules are waited for.
        self._still_to_use = fed if used_before else set(range(len(self._counts)))
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

    def forget(self) -> None:
        """Begins anew, after an error that all ranks have raised in the same step."""
        for counts in self._counts:
            counts.forget()
        self._sent_order, self._pending = [], []
        self._used_in_step, self._still_to_use = set(), set()
        self._sent_since_use = False
