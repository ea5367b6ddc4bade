"""Whether rows of a module have changed since some of them were sent early.

Rows are sent early while one batch is trained, and they are those that this batch does not update.
Whatever else changes rows before they are used makes them useless: a state that is loaded, or
another batch that is trained in between, as in a plain loop while a pipeline is detached.  All
ranks do such things together, so each of them knows by itself.
"""

import weakref

__all__ = ["RowChanges"]


class RowChanges:
    """Counts changes of the rows of a module, but for those by the batch that is expected.

    Attributes:
        count: how many there were.
    """

    def __init__(self) -> None:
        self.count = 0
        self._expected: weakref.ref[object] | None = None

    def expect(self, batch: object) -> None:
        """Takes the batch whose update does not count: it leaves alone what is sent early."""
        self._expected = weakref.ref(batch)

    def update(self, batch: object) -> None:
        """Notes that rows are about to be updated by a batch."""
        if self._expected is None or self._expected() is not batch:
            self.count += 1

    def overwrite(self) -> None:
        """Notes that rows are about to be overwritten."""
        self.count += 1
