"""Finds batches that must not be trained on, and leaves them out or raises, on all ranks alike.

A step goes through three gates.  Batches are checked by their readers; ranks tell each other before
a batch is sent to owners.  Gradients are checked where they reach the embedding tables, before any
table is updated; ranks tell each other there, too.  Gradients of the dense part are the same on all
ranks when they are checked, just before the optimizer's step.

On CUDA the second gate does not stop the host: the device makes gradients zero if those of any rank
are bad, and the host looks at both verdicts at the third gate.  One wait a step is the least:
whether the optimizer may do this step, and whether there is an error in it, is for the host to say.

A batch that is left out is replaced by one without ids, so that the step still has its number:
data, schedules and checkpoints go on as if it had been a batch that taught nothing.  Where it is
the gradients that are bad, tables get gradients of zero.  In both cases the dense part is not
updated.

A batch that cannot be read at all, because a file is damaged or a reader has died, ends the run
whatever the policy is: also on the ranks that could read theirs.
"""

import sys
from collections import deque
from collections.abc import Iterable, Iterator
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torchrec.datasets.utils import Batch
from torchrec.optim.keyed import KeyedOptimizer, OptimizerWrapper

from fusedrec_torchrec.codecs.dense_gradients import GradientThresholds
from fusedrec_torchrec.core.all_ranks import gather_from_all_ranks
from fusedrec_torchrec.core.lost_rank import wait
from fusedrec_torchrec.core.max_abs import max_abs
from fusedrec_torchrec.core.transfer import to_host
from fusedrec_torchrec.training.batch_reader import BatchReader, Unread
from fusedrec_torchrec.training.config import BadBatchesConfig
from fusedrec_torchrec.training.data.batch_check import CheckedBatch, stand_in

__all__ = ["BadBatchError", "BadBatches", "GuardedOptimizer"]

GOOD, BAD, UNREAD = 0, 1, 2  # what ranks tell each other about a batch

# Squares of gradients are still numbers, and so are their sums over columns and equal ids.
LARGEST = 1e15
TOO_LARGE = "are not finite, or too large to be squared"
HIGH_RATES = "learning rates that are too high make such, too (optimizer.*.learning_rate); "
HELD_OUT = "held-out batch"
GRADIENTS = f"gradients of the embeddings {TOO_LARGE}"
DENSE = f"gradients of the dense part {TOO_LARGE}"


class BadBatchError(ValueError):
    """There is a batch that cannot be trained on; all ranks raise the same."""


class BadBatches:
    """Finds bad batches and gradients, and does what the policy says; the same on all ranks.

    Args:
        config: the policy.
        timeout: how long ranks wait for each other.
        quiet: counts steps that are left out, but does not tell of each.
    """

    def __init__(
        self, config: BadBatchesConfig, timeout: timedelta | None = None, quiet: bool = False
    ) -> None:
        self._config = config
        self._quiet = quiet
        # Ranks talk about a batch while others are on their way: a group of its own, on the CPU.
        self._group = dist.new_group(backend="gloo", timeout=timeout)
        self._steps_ahead: deque[tuple[int, bool]] = deque()  # step, whether it is left out
        self._bad_gradients = False
        # Of gradients on CUDA: whether those of this rank are bad, and whether those of any are.
        self._verdicts: list[torch.Tensor] = []
        self.skipped_steps = 0
        """Steps that were not trained on, of those that are done since this began."""
        self.skipped = 0
        """Steps that were left out, in a run that goes on also before."""

    def go_on(self, skipped: int) -> None:
        """Goes on with a run in which so many steps were left out before."""
        self.skipped = skipped

    # ------------------------------------------------------------ batches

    def watch(self, batches: Iterable[Batch], first: int, stop: int) -> Iterator[Batch]:
        """Yields the batches of steps ``first`` up to ``stop``, bad ones replaced.

        Ranks hear of a batch one batch ahead, so nobody waits.

        Raises:
            BadBatchError: there is a bad one, and the policy is ``error``; or one that a rank could
                not read.
        """
        ahead: tuple[int, Batch | Unread, _Statuses] | None = None
        reader = BatchReader(batches)
        for step in range(first, stop):
            batch = reader.next()
            coming = step, batch, _Statuses(self._group, _problem_of(batch), _status_of(batch))
            if ahead is not None:
                yield self._arrived(*ahead)
            ahead = coming
        if ahead is not None:
            yield self._arrived(*ahead)

    def _arrived(self, step: int, batch: Batch | Unread, statuses: "_Statuses") -> Batch:
        bad = statuses.wait()
        if bad:
            batch = self._replaced(step, batch, statuses, "batch")
        assert isinstance(batch, Batch)
        self._steps_ahead.append((step, bad))
        return batch

    def held_out(self, batches: Iterable[Batch], count: int, good: deque[bool]) -> Iterator[Batch]:
        """Yields ``count`` batches to evaluate on, bad ones replaced.

        ``good`` receives for each of them whether it is a good one of the data.

        Raises:
            BadBatchError: there is a bad one, and the policy is ``error``; or one that a rank could
                not read.
        """
        reader = BatchReader(batches)
        for number in range(count):
            batch = reader.next()
            statuses = _Statuses(self._group, _problem_of(batch), _status_of(batch))
            bad = statuses.wait()
            if bad:
                batch = self._replaced(number, batch, statuses, HELD_OUT)
            assert isinstance(batch, Batch)
            good.append(not bad)
            yield batch

    def _replaced(
        self, step: int, batch: Batch | Unread, statuses: "_Statuses", what: str
    ) -> Batch:
        """Returns a batch that teaches nothing, or raises; all ranks call it for the same step."""
        if statuses.any_unread:
            own = batch.problem if isinstance(batch, Unread) else None
            rank, problem, _ = self._first_problem(own)
            cause = batch.error if isinstance(batch, Unread) else None
            raise BadBatchError(
                f"{what} {_place(step, what)} cannot be read, rank {rank}: {problem}"
            ) from cause
        assert isinstance(batch, Batch)
        self._leave_out(step, statuses.problem, what)
        return stand_in(batch)

    def _first_problem(self, own: str | None) -> tuple[int, str, int]:
        """Returns the first rank with a problem, its problem, and how many more have one."""
        problems = gather_from_all_ranks(own, self._group)
        bad = [(rank, problem) for rank, problem in enumerate(problems) if problem is not None]
        return *bad[0], len(bad) - 1

    def _leave_out(self, step: int, own: str | None, what: str) -> None:
        """Counts a bad batch and tells of it, or raises; all ranks call it for the same step."""
        rank, problem, others = self._first_problem(own)
        more = f" (and of {others} more ranks)" if others else ""
        text = f"{what} {_place(step, what)}, rank {rank}{more}: {problem}"
        if self._config.policy == "error":
            raise BadBatchError(
                f"bad {text}; {HIGH_RATES if what == 'gradients' else ''}"
                "bad_batches.policy: skip would leave it out"
            )
        if what == HELD_OUT:  # no step of the training
            self._say(text)
        else:
            self._skip(text)

    def _say(self, text: str) -> None:
        if dist.get_rank() == 0 and not self._quiet:
            print(f"skipped bad {text}", file=sys.stderr, flush=True)

    def _skip(self, text: str) -> None:
        self.skipped += 1
        self._say(text)
        if self._config.most is not None and self.skipped > self._config.most:
            raise BadBatchError(
                f"{self.skipped} steps were skipped, bad_batches.most is {self._config.most}; the "
                f"last one: {text}"
            )

    # ------------------------------------------------------------ gradients

    def guard(self, module: nn.Module) -> None:
        """Checks gradients where they reach a module's output, in every backward pass."""
        module.register_forward_hook(self._hook)

    def _hook(self, module: nn.Module, inputs: Any, output: Any) -> None:
        # TorchRec's pipeline traces the model once, with something that is no tensor.
        if isinstance(output, torch.Tensor) and output.requires_grad:
            output.register_hook(self._check)

    def _check(self, gradient: torch.Tensor) -> torch.Tensor | None:
        if gradient.is_cuda:
            return self._checked_on_device(gradient)
        is_good = not gradient.numel() or bool(max_abs(gradient) <= LARGEST)
        problem = None if is_good else GRADIENTS
        statuses = _Statuses(self._group, problem, GOOD if problem is None else BAD)
        if not statuses.wait():
            return None
        step, left_out = self._steps_ahead[0]
        if not left_out:
            self._leave_out(step, problem, "gradients")
        self._bad_gradients = True
        return torch.zeros_like(gradient)

    def _checked_on_device(self, gradient: torch.Tensor) -> torch.Tensor:
        """Returns the gradient, zero if that of any rank is bad; ``may_update`` tells the host."""
        own = torch.zeros(1, dtype=torch.int32, device=gradient.device)
        if gradient.numel():
            own = (~(max_abs(gradient) <= LARGEST)).int().view(1)
        of_any = own.clone()
        dist.all_reduce(of_any, op=dist.ReduceOp.MAX)
        self._verdicts.append(torch.cat([own, of_any]))
        return gradient.masked_fill(of_any.bool(), 0.0)

    def may_update(self, parameters: Iterable[torch.Tensor]) -> bool:
        """Tells whether the optimizer may do its step; called once in every training step."""
        step, left_out = self._steps_ahead.popleft()
        bad, self._bad_gradients = self._bad_gradients, False
        verdicts, self._verdicts = self._verdicts, []
        if left_out or bad:
            self.skipped_steps += 1
            return False
        if not self._config.gradients:
            return True
        gradients = [p.grad for p in parameters if p.grad is not None and p.grad.numel()]
        if gradients:
            largest = torch.stack([max_abs(gradient) for gradient in gradients]).amax()
            verdicts.append((~(largest <= LARGEST)).int().view(1))
        told = to_host(torch.cat(verdicts)) if verdicts else []
        dense = told.pop() if gradients else 0
        if any(told[1::2]):
            self._leave_out(step, GRADIENTS if any(told[::2]) else None, "gradients")
            self.skipped_steps += 1
            return False
        if not dense:
            return True
        # All ranks have the same sums.  Tables have had finite gradients of their own.
        text = f"gradients of step {step + 1}: {DENSE}"
        if self._config.policy == "error":
            raise BadBatchError(
                f"bad {text}; {HIGH_RATES}bad_batches.policy: skip would leave it out"
            )
        self._skip(text)
        self.skipped_steps += 1
        return False


def _place(step: int, what: str) -> str:
    return f"number {step + 1}" if what == HELD_OUT else f"of step {step + 1}"


def _problem_of(batch: Batch | Unread) -> str | None:
    return batch.problem if isinstance(batch, CheckedBatch | Unread) else None


def _status_of(batch: Batch | Unread) -> int:
    if isinstance(batch, Unread):
        return UNREAD
    return GOOD if _problem_of(batch) is None else BAD


class _Statuses:
    """Is the status of a batch on every rank, on its way between them."""

    def __init__(self, group: dist.ProcessGroup, problem: str | None, status: int) -> None:
        self.problem = problem
        self._group = group
        self._own = torch.tensor([status], dtype=torch.int32)
        self._of_ranks = self._own.new_empty(dist.get_world_size(group))
        self._work: Any = dist.all_gather_single(
            self._of_ranks, self._own, group=group, async_op=True
        )

    def wait(self) -> bool:
        """Waits for all ranks; returns whether any of them has a problem."""
        wait(self._work, self._group, "batch check")
        return bool(self._of_ranks.any())

    @property
    def any_unread(self) -> bool:
        """Whether a rank could not read its batch; once all have been waited for."""
        return bool((self._of_ranks == UNREAD).any())


class GuardedOptimizer(OptimizerWrapper):
    """Leaves out the dense part's update where a step is skipped; schedules go on.

    Args:
        optimizer: that of all parameters.
        bad_batches: tells which steps are skipped.
        thresholds: those of the dense part's gradients, if it has them.
    """

    def __init__(
        self,
        optimizer: KeyedOptimizer,
        bad_batches: BadBatches,
        thresholds: GradientThresholds | None = None,
    ) -> None:
        super().__init__(optimizer)
        self._bad_batches = bad_batches
        self._thresholds = thresholds
        # TorchRec makes the dictionary of all parameters anew whenever it is asked for.
        self._parameters = [p for p in self.params.values() if isinstance(p, nn.Parameter)]

    def step(self, closure: Any = None) -> None:
        """Updates all parameters, or none of the dense part if the step is skipped."""
        if not self._bad_batches.may_update(self._parameters):
            for parameter in self._parameters:
                parameter.grad = None
            if self._thresholds is not None:
                self._thresholds.undo()
        super().step(closure)
