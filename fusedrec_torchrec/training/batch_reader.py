"""Reads batches one by one; one that cannot be read is no exception yet.

A rank that raised at once would leave the others waiting for it.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from torchrec.datasets.utils import Batch

__all__ = ["BatchReader", "Unread"]


@dataclass(frozen=True)
class Unread:
    """Takes the place of a batch that this rank could not read."""

    problem: str
    error: Exception


class BatchReader:
    """Gives batches as they come; after one that cannot be read it gives only ``Unread``.

    So a rank that cannot read goes on as long as the others do, until all of them hear of it.
    """

    def __init__(self, batches: Iterable[Batch]) -> None:
        self._batches = iter(batches)
        self._unread: Unread | None = None

    def next(self) -> Batch | Unread:
        """Returns the next batch, or why it cannot be read."""
        if self._unread is not None:
            return self._unread
        try:
            return next(self._batches)
        except Exception as error:
            name = "" if isinstance(error, ValueError) else f"{type(error).__name__}: "
            self._unread = Unread(f"{name}{error}", error)
            return self._unread
