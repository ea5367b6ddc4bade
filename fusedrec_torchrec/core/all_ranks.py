"""Errors that reach every rank: what goes wrong on one is raised on all of them."""

from collections.abc import Sequence
from typing import TypeVar

import torch
import torch.distributed as dist

__all__ = [
    "first_problem",
    "gather_from_all_ranks",
    "listed_ranks",
    "raise_bad_input",
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
    text = torch.zeros(MESSAGE_BYTES, dtype=torch.uint8, device=device)
    if pg.rank() == first:
        assert own_message is not None
        encoded = own_message.encode()[:MESSAGE_BYTES]
        text[: len(encoded)] = torch.frombuffer(bytearray(encoded), dtype=torch.uint8).to(device)
    dist.broadcast(text, src=dist.get_global_rank(pg, first), group=pg)
    message = bytes(text.cpu().tolist()).rstrip(b"\0").decode(errors="replace")
    others = ", ".join(str(rank) for rank in failed_ranks[1:])
    also = f" (bad input on ranks {others}, too)" if others else ""
    raise ValueError(f"bad input on rank {first}: {message}{also}")
