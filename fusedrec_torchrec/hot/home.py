"""The homes of a bucket's hot rows: the owner's rows in the bucket's table.

While a row is hot its home is out of date; ``write`` brings it up to date, before anybody looks at
the table.  But everybody may write into the table, too, and for as long as they like: who keeps a
state dict keeps the table's memory.  So a home remembers what ``write`` wrote.  Where it holds
something else, somebody else wrote after that; such a number is *newer*, and the home counts,
not the replica, until the replicas have been loaded from the homes.
"""

import torch

from fusedrec_torchrec.compat.bucket_table import BucketKernel
from fusedrec_torchrec.compat.tensor_version import versions

__all__ = ["Home"]


class Home:
    """The homes on this rank of one bucket's hot rows; in the beginning all numbers are newer.

    Args:
        kernel: the bucket.
        places: places of the replica whose home is here.
        rows: the home of each of these places, a row of the bucket's table.

    Attributes:
        newer: of each tensor, weights and optimizer state, which of its numbers are.
    """

    def __init__(self, kernel: BucketKernel, places: torch.Tensor, rows: torch.Tensor) -> None:
        self._table = kernel.table
        self._tensors = kernel.table.row_tensors()
        self.places, self.rows = places, rows
        self.all_newer()
        self._written: list[torch.Tensor] | None = None
        self._seen = -1  # sum of the tensors' versions: grows when somebody writes

    def read(self) -> list[torch.Tensor]:
        """Returns what is in the homes: weights and optimizer state."""
        self._table.flush()  # of a cache, where the bucket's table has one
        return [tensor.index_select(0, self.rows) for tensor in self._tensors]

    def write(self, replica: list[torch.Tensor]) -> None:
        """Brings the homes up to date, all but what is newer.

        Args:
            replica: the replica's tensors.
        """
        if self.any_newer():
            values = [
                torch.where(newer, there, tensor.index_select(0, self.places))
                for newer, there, tensor in zip(self.newer, self.read(), replica, strict=True)
            ]
        else:
            values = [tensor.index_select(0, self.places) for tensor in replica]
        self._table.flush()
        for tensor, value in zip(self._tensors, values, strict=True):
            tensor.index_copy_(0, self.rows, value)
        self._table.forget_cache()
        self._written = values
        self._seen = versions(self._tensors)

    def any_newer(self) -> bool:
        """Returns whether any home counts more than its replica.

        Without a look at the rows unless somebody has had access to them.
        """
        if self._written is not None and self._seen != versions(self._tensors):
            for newer, there, ours in zip(self.newer, self.read(), self._written, strict=True):
                newer |= _bits(there) != _bits(ours)
            self.set_newer(self.newer)
            self._seen = versions(self._tensors)
        return self._any_newer

    def all_newer(self) -> None:
        """Makes all homes count: they are about to be overwritten."""
        self.set_newer(self._everywhere(True))

    def set_newer(self, newer: list[torch.Tensor]) -> None:
        self.newer = newer
        self._any_newer = any(bool(of_tensor.any()) for of_tensor in newer)

    def none_newer(self) -> None:
        """Makes no home count: the replicas have been loaded from them."""
        self.set_newer(self._everywhere(False))
        self._written = self.read()
        self._seen = versions(self._tensors)

    def look_again(self) -> None:
        """Distrusts versions: somebody got access, and may write in ways torch does not count."""
        self._seen = -1

    def _everywhere(self, value: bool) -> list[torch.Tensor]:
        shapes = [(self.places.numel(), tensor.size(1)) for tensor in self._tensors]
        return [torch.full(shape, value, device=self.places.device) for shape in shapes]


def _bits(values: torch.Tensor) -> torch.Tensor:
    """Returns the same memory as integers: NaN equals itself, and zero differs from minus zero."""
    return values.view(torch.int32 if values.element_size() == 4 else torch.int16)
