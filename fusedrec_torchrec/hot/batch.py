"""What becomes of the hot rows of one batch."""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torchrec.streamable import Multistreamable

if TYPE_CHECKING:
    from fusedrec_torchrec.hot.rows import HotRows

__all__ = ["HotBatch"]


@dataclass
class HotBatch(Multistreamable):
    """The hot rows of one batch, from input dist to backward.

    Attributes:
        rows: the hot rows of the module.
        version: the hot set that the batch was routed by.
        loads: how often the replicas had been loaded from their homes when it was routed.
        slots: of each bucket, the slots of the replica that the batch uses, each once.
        counts: [rank][bucket] how many slots each rank uses; all ranks know it.
        stale: whether some rank's replicas are older than their homes; all ranks know it.
        needs_owners: whether any rank's batch has rows that are not hot; all ranks know it.
    """

    rows: "HotRows"
    version: int
    loads: int
    slots: list[torch.Tensor] = field(default_factory=list)
    counts: list[list[int]] = field(default_factory=list)
    stale: bool = False
    needs_owners: bool = True

    def record_stream(self, stream: torch.Stream) -> None:
        for slots in self.slots:
            slots.record_stream(stream)

    def enter(self) -> None:
        """Before the batch's lookup: replicas and homes become those the batch was routed by."""
        self.rows.enter(self)

    def look_up(self, out: torch.Tensor) -> None:
        """The hot rows, bucket after bucket, into a flat buffer."""
        self.rows.look_up(self, out)

    def send_gradients(self, flat: torch.Tensor) -> None:
        """Starts the sync of the gradients of what ``look_up`` gave."""
        self.rows.send_gradients(self, flat)
