"""The home slots of a bucket's hot rows: the owner's rows in the bucket's table.

While a row is hot its home is out of date; ``write`` brings it up to date, before anybody looks at
the table.  But everybody may write into the table, too, and for as long as they like: who keeps a
state dict keeps the table's memory.  So a home remembers what ``write`` wrote.  Where it holds
something else, somebody else wrote after that; such a row is *foreign*, and its home counts, not
its replica, until the replicas have been loaded from the homes.
"""

import torch

from fusedrec_torchrec.exchange.lookup import BucketKernel
from fusedrec_torchrec.hot.replica import tensors_of

__all__ = ["Home"]


class Home:
    """The homes on this rank of one bucket's hot rows; in the beginning all are foreign.

    Args:
        kernel: the bucket.
        slots: slots of the replica whose home is here.
        rows: the home of each of these slots, a row of the bucket's table.
    """

    def __init__(self, kernel: BucketKernel, slots: torch.Tensor, rows: torch.Tensor) -> None:
        self._table = kernel.table
        self._tensors = tensors_of(kernel.table)
        self.slots, self.rows = slots, rows
        self.foreign = torch.ones_like(slots, dtype=torch.bool)
        self._any_foreign = slots.numel() > 0
        self._written: list[torch.Tensor] | None = None
        self._seen = -1  # sum of the tensors' versions: grows when somebody writes

    def read(self) -> list[torch.Tensor]:
        """What is in the homes: weights and optimizer state."""
        self._table.flush()  # of a cache, where the bucket's table has one
        return [tensor.index_select(0, self.rows) for tensor in self._tensors]

    def write(self, replica: list[torch.Tensor]) -> None:
        """Brings all homes up to date but the foreign ones.

        Args:
            replica: the replica's tensors.
        """
        if self.any_foreign():
            values = [
                torch.where(self.foreign[:, None], there, tensor.index_select(0, self.slots))
                for there, tensor in zip(self.read(), replica, strict=True)
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
            for there, ours in zip(self.read(), self._written, strict=True):
                self.foreign |= (_bits(there) != _bits(ours)).any(1)
            self._any_foreign = bool(self.foreign.any())
            self._seen = self._versions()
        return self._any_foreign

    def all_foreign(self) -> None:
        """The homes are about to be overwritten."""
        self.set_foreign(torch.ones_like(self.foreign))

    def set_foreign(self, foreign: torch.Tensor) -> None:
        self.foreign = foreign
        self._any_foreign = bool(foreign.any())

    def none_foreign(self) -> None:
        """The replicas have been loaded from the homes."""
        self.set_foreign(torch.zeros_like(self.foreign))
        self._written = self.read()
        self._seen = self._versions()

    def look_again(self) -> None:
        """Somebody got access, and may write in ways that torch does not count."""
        self._seen = -1

    def _versions(self) -> int:
        return sum(tensor._version for tensor in self._tensors)


def _bits(values: torch.Tensor) -> torch.Tensor:
    """The same memory as integers: not-a-number equals itself, and zero differs from minus zero."""
    return values.view(torch.int32 if values.element_size() == 4 else torch.int16)
