"""What goes wrong on one rank is raised on all of them."""

from collections.abc import Sequence
from typing import TypeVar

import torch.distributed as dist

__all__ = ["listed_ranks", "of_all_ranks", "raise_together"]

T = TypeVar("T")

MOST_LISTED = 8


def listed_ranks(ranks: Sequence[int]) -> str:
    """Writes down ranks for an error message; of a cluster of thousands, the first ones."""
    more = f" and {len(ranks) - MOST_LISTED} more" if len(ranks) > MOST_LISTED else ""
    numbers = ", ".join(map(str, ranks[:MOST_LISTED]))
    return f"rank{'s' if len(ranks) != 1 else ''} {numbers}{more}"


def of_all_ranks(value: T, group: dist.ProcessGroup | None = None) -> list[T]:
    """By rank; a collective."""
    if not dist.is_initialized() or dist.get_world_size(group) == 1:
        return [value]
    found: list[T] = [value] * dist.get_world_size(group)
    dist.all_gather_object(found, value, group=group)
    return found


def raise_together(problem: str | None, group: dist.ProcessGroup | None = None) -> None:
    """
    Raises:
        ValueError: on all ranks, if one has a problem; that of the lowest rank.
    """
    first = next((text for text in of_all_ranks(problem, group) if text is not None), None)
    if first is not None:
        raise ValueError(first)
