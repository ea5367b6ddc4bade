"""What a bucket's replica needs to go on alone for some steps, and to come back.

A rank sums up its own gradients and remembers which places it has changed, and what all places were
when the replicas of all ranks agreed.
"""

import torch

from fusedrec_torchrec.core import operators
from fusedrec_torchrec.replicas.replica import Replica

__all__ = ["StepsAlone"]


class StepsAlone:
    """The steps of one bucket's replica since the last sync.

    Args:
        replica: the bucket's.

    Attributes:
        sum: of this rank's gradients, for each place.
    """

    def __init__(self, replica: Replica) -> None:
        self._replica = replica
        self._base = [tensor.clone() for tensor in replica.with_spare]  # after the last sync
        weights = replica.tensors[0]
        self.sum = torch.zeros(weights.shape, device=weights.device)
        self._is_touched = torch.zeros(len(weights), dtype=torch.bool, device=weights.device)
        self._end = torch.tensor([len(weights)], device=weights.device)
        self._listed: torch.Tensor | None = None  # places, before it is known how many there are
        self._touched: torch.Tensor | None = None

    def reconciled(self) -> list[torch.Tensor]:
        """Returns the replica's rows as they were after the last sync, the same on all ranks."""
        return [base[: len(self.sum)] for base in self._base]

    def add(self, places_M: torch.Tensor, gradients_MD: torch.Tensor) -> None:
        """Takes the gradients of one step."""
        index_M = places_M.long()
        self.sum.index_add_(0, index_M, gradients_MD.to(self.sum.dtype))
        self._is_touched.index_fill_(0, index_M, True)

    def count(self) -> torch.Tensor:
        """Returns how many places were touched, one int32; on CUDA the host does not wait."""
        device = self._is_touched.device
        if device.type == "cuda" and operators.available_on(device, "list_flags"):
            message = torch.ops.fusedrec.list_flags(self._is_touched, self._end)
            self._listed = message[1:]
            return message[:1]
        self._listed = self._is_touched.nonzero().flatten().int()
        return self._listed.new_full((1,), self._listed.numel())

    def touched(self, count: int) -> torch.Tensor:
        """Returns the places that were touched, int32, and remembers them.

        Args:
            count: what ``count`` has counted.
        """
        assert self._listed is not None
        self._touched, self._listed = self._listed[:count], None
        return self._touched

    def restore(self) -> None:
        """Undoes what this rank did alone."""
        assert self._touched is not None
        places, self._touched = self._touched.long(), None
        for tensor, base in zip(self._replica.with_spare, self._base, strict=True):
            tensor.index_copy_(0, places, base.index_select(0, places))
        self.sum.index_fill_(0, places, 0)
        self._is_touched.index_fill_(0, places, False)

    def reset(self) -> None:
        """Begins anew: the replica has other values now."""
        for tensor, base in zip(self._replica.with_spare, self._base, strict=True):
            base.copy_(tensor)
        self.sum.zero_()
        self._is_touched.zero_()

    def keep(self, places: torch.Tensor) -> None:
        """Takes the rows as what all ranks have in common from here on."""
        for tensor, base in zip(self._replica.with_spare, self._base, strict=True):
            base.index_copy_(0, places.long(), tensor.index_select(0, places))
