"""Errors that reach every rank: what goes wrong on one is raised on all of them.

Where any rank may have a problem and nobody knows which, texts of all are gathered
(``raise_on_all_ranks``, ``raise_naming_ranks``).  Where all know who speaks, that rank's text is
broadcast (``on_first_rank``, ``raise_bad_input``).
"""

import pickle
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist

__all__ = [
    "first_problem",
    "gather_from_all_ranks",
    "listed_ranks",
    "on_first_rank",
    "raise_bad_input",
    "raise_naming_ranks",
    "raise_on_all_ranks",
]

T = TypeVar("T")

MOST_LISTED = 8
MESSAGE_BYTES = 2048


def listed_ranks(ranks: Sequence[int]) -> str:
    """Writes down ranks for an error message; of a cluster of thousands, the first ones."""
    more = f" and {len(ranks) - MOST_LISTED} more" if len(ranks) > MOST_LISTED else ""
    numbers = ", ".join(map(str, ranks[:MOST_LISTED]))
    return f"rank{'s' if len(ranks) != 1 else ''} {numbers}{more}"


def gather_from_all_ranks(value: T, group: dist.ProcessGroup | None = None) -> list[T]:
    """Returns the value of every rank, in rank order; all ranks must call it."""
    if not dist.is_initialized() or dist.get_world_size(group) == 1:
        return [value]
    values: list[T] = [value] * dist.get_world_size(group)
    dist.all_gather_object(values, value, group=group)
    return values


def first_problem(problem: str | None, group: dist.ProcessGroup | None = None) -> str | None:
    """Returns the problem of the lowest rank that has one; all ranks must call it."""
    problems = gather_from_all_ranks(problem, group)
    return next((text for text in problems if text is not None), None)


def raise_on_all_ranks(problem: str | None, group: dist.ProcessGroup | None = None) -> None:
    """Raises if any rank has a problem; all ranks must call it.

    Args:
        problem: of this rank; None if it has none.
        group: the ranks; all if None.

    Raises:
        ValueError: with the problem of the lowest rank that has one.
    """
    first = first_problem(problem, group)
    if first is not None:
        raise ValueError(first)


def raise_naming_ranks(problem: str | None, group: dist.ProcessGroup | None = None) -> None:
    """Raises if any rank has a problem, and says which ranks do; all ranks must call it.

    It is for what every rank does for itself, such as to read a file.  A problem that all ranks
    have in common is raised as it is.

    Args:
        problem: of this rank; None if it has none.
        group: the ranks, which are numbered within it; all if None.

    Raises:
        ValueError: with the problem of the lowest rank that has one.
    """
    problems = gather_from_all_ranks(problem, group)
    failed = [rank for rank, text in enumerate(problems) if text is not None]
    if not failed:
        return
    first = problems[failed[0]]
    if len(failed) == len(problems) and len(set(problems)) == 1:
        raise ValueError(first)
    others = f" ({listed_ranks(failed[1:])}, too)" if failed[1:] else ""
    raise ValueError(f"on rank {failed[0]}{others}: {first}")


def on_first_rank(
    function: Callable[[], T],
    group: dist.ProcessGroup | None = None,
    carried: tuple[type[Exception], ...] = (ValueError, OSError),
) -> T:
    """Returns on all ranks what a function returns on the first; all ranks must call it.

    Args:
        function: called on the first rank alone; what it returns is pickled.
        group: the ranks; all if None.
        carried: exceptions of the function that are carried to all ranks.  Another one is raised on
            the first rank alone, while the others wait for it.

    Raises:
        Exception: what the function raised on the first rank, if it is among ``carried``.
        RuntimeError: in its place, with its text, if it cannot be pickled.
    """
    result: T | None = None
    problem: Exception | None = None
    if dist.get_rank(group) == 0:
        try:
            result = function()
        except carried as error:
            problem = _portable(error)
    answer: tuple[T, Exception | None] = _from_rank(0, (result, problem), group)
    if answer[1] is not None:
        raise answer[1] if problem is None else problem
    return answer[0]


def _portable(error: Exception) -> Exception:
    """Returns the exception itself if other processes can read it, or else its text."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:  # whatever a class of somebody else does when it is copied
        return RuntimeError(f"{type(error).__name__}: {error}")
    return error


def _from_rank(
    rank: int,
    value: Any,
    group: dist.ProcessGroup | None,
    device: torch.device | None = None,
) -> Any:
    """Returns the value of one rank of a group, which goes by its number there, on all of them."""
    values = [value]
    if dist.get_world_size(group) > 1:
        dist.broadcast_object_list(values, group=group, group_src=rank, device=device)
    return values[0]


def raise_bad_input(
    pg: dist.ProcessGroup,
    failed_ranks: Sequence[int],
    own_message: str | None,
    device: torch.device,
) -> None:
    """Raises the same ``ValueError`` on every rank, where all know that some have bad input.

    Every rank must come here in the same step, which the status words of the input dist make sure
    of.  The text is that of the lowest failed rank.

    Args:
        pg: the process group.
        failed_ranks: ranks of the group whose input was bad; the same list on every rank.
        own_message: this rank's message if it is among them.
        device: where collectives run.
    """
    first = failed_ranks[0]
    if pg.rank() == first:
        assert own_message is not None
        own_message = own_message.encode()[:MESSAGE_BYTES].decode(errors="replace")
    message = _from_rank(first, own_message, pg, device)
    others = ", ".join(str(rank) for rank in failed_ranks[1:])
    also = f" (bad input on ranks {others}, too)" if others else ""
    raise ValueError(f"bad input on rank {first}: {message}{also}")
