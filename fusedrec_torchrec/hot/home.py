"""The home slots of a bucket's hot rows: the owner's rows in the bucket's table.

While a row is hot its home is out of date; ``write`` brings it up to date, before anybody looks at
the table.  But everybody may write into the table, too, and for as long as they like: who keeps a
state dict keeps the table's memory.  So a home remembers what ``write`` wrote.  Where it holds
something else, somebody else wrote after that; such a number is *foreign*, and the home counts,
not the replica, until the replicas have been loaded from the homes.
"""

import torch

from fusedrec_torchrec.compat.bucket_table import BucketKernel

__all__ = ["Home"]


class Home:
    """The homes on this rank of one bucket's hot rows; in the beginning all numbers are foreign.

    Args:
        kernel: the bucket.
        slots: slots of the replica whose home is here.
        rows: the home of each of these slots, a row of the bucket's table.

    Attributes:
        foreign: of each tensor, weights and optimizer state, which of its numbers are.
    """

    def __init__(self, kernel: BucketKernel, slots: torch.Tensor, rows: torch.Tensor) -> None:
        self._table = kernel.table
        self._tensors = kernel.table.row_tensors()
        self.slots, self.rows = slots, rows
        self.all_foreign()
        self._written: list[torch.Tensor] | None = None
        self._seen = -1  # sum of the tensors' versions: grows when somebody writes

    def read(self) -> list[torch.Tensor]:
        """What is in the homes: weights and optimizer state."""
        self._table.flush()  # of a cache, where the bucket's table has one
        return [tensor.index_select(0, self.rows) for tensor in self._tensors]

    def write(self, replica: list[torch.Tensor]) -> None:
        """Brings the homes up to date, all but what is foreign.

        Args:
            replica: the replica's tensors.
        """
        if self.any_foreign():
            values = [
                torch.where(foreign, there, tensor.index_select(0, self.slots))
                for foreign, there, tensor in zip(self.foreign, self.read(), replica, strict=True)
            ]
        else:
            values = [tensor.index_select(0, self.slots) for tensor in replica]
        self._table.flush()
        for tensor, value in zip(self._tensors, values, strict=True):
            tensor.index_copy_(0, self.rows, value)
        if self._table.lxu_cache_weights.numel():
            self._table.reset_cache_states()
        self._written = values
        self._seen = self._versions()

    def any_foreign(self) -> bool:
        """Whether a home counts more than its replica.

        Without a look at the rows unless somebody has had access to them.
        """
        if self._written is not None and self._seen != self._versions():
            for foreign, there, ours in zip(self.foreign, self.read(), self._written, strict=True):
                foreign |= _bits(there) != _bits(ours)
            self.set_foreign(self.foreign)
            self._seen = self._versions()
        return self._any_foreign

    def all_foreign(self) -> None:
        """The homes are about to be overwritten."""
        self.set_foreign(self._everywhere(True))

    def set_foreign(self, foreign: list[torch.Tensor]) -> None:
        self.foreign = foreign
        self._any_foreign = any(bool(each.any()) for each in foreign)

    def none_foreign(self) -> None:
        """The replicas have been loaded from the homes."""
        self.set_foreign(self._everywhere(False))
        self._written = self.read()
        self._seen = self._versions()

    def look_again(self) -> None:
        """Somebody got access, and may write in ways that torch does not count."""
        self._seen = -1

    def _everywhere(self, value: bool) -> list[torch.Tensor]:
        shapes = [(self.slots.numel(), tensor.size(1)) for tensor in self._tensors]
        return [torch.full(shape, value, device=self.slots.device) for shape in shapes]

    def _versions(self) -> int:
        return sum(tensor._version for tensor in self._tensors)


def _bits(values: torch.Tensor) -> torch.Tensor:
    """The same memory as integers: not-a-number equals itself, and zero differs from minus zero."""
    return values.view(torch.int32 if values.element_size() == 4 else torch.int16)
