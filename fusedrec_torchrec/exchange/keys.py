"""Ids to keys of the fused key space, and the check that every id is in its table's range.

FBGEMM maps an out-of-range id to row 0 and goes on training; here it is an error.  The check
stays on the device: its verdict travels in the status word of the input dist, so nothing waits
for it and every rank learns of it in the same step.
"""

from collections.abc import Sequence

import torch

from fusedrec_torchrec.exchange.layout import ExchangeLayout
from fusedrec_torchrec.exchange.options import ExchangeOptions
from fusedrec_torchrec.exchange.slot_ids import PerSlot, SlotIds

__all__ = ["KeySpace"]


class KeySpace:
    """Turns the ids of a batch, slot after slot, into keys."""

    def __init__(self, layout: ExchangeLayout, options: ExchangeOptions) -> None:
        self._layout = layout
        rows = [table.rows for table in layout.tables for _ in table.features]
        self._ids = SlotIds(layout.slot_names, rows, options, layout.device)

    @property
    def salts_S2(self) -> torch.Tensor | None:
        """For each slot whether its ids are raw values, and their salt; None if none are."""
        return self._ids.salts_S2

    def hashed(self, ids_N: torch.Tensor, counts: Sequence[int]) -> torch.Tensor:
        """Returns the ids, those of tables with raw ids hashed to rows."""
        return self._ids.hashed(ids_N, counts)

    def keys(self, ids_N: torch.Tensor, counts: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the keys of the ids, and whether any id is out of its table's range.

        Args:
            ids_N: int32 or int64 ids, grouped by slot.
            counts: the number of ids of each slot.

        Returns:
            keys_N of the layout's key dtype, and a 0-dim bool tensor, both on the ids' device.
            If there are out-of-range ids, keys mean nothing, but are in the key space.
        """
        layout = self._layout
        ids_N = self._ids.hashed(ids_N, counts)
        per_slot = PerSlot(counts, ids_N.device)
        ids = per_slot.view(ids_N)
        bad = ((ids < 0) | (ids >= per_slot(layout.slot_rows_S))).any()
        ids = torch.where(bad, torch.zeros_like(ids), ids)
        if layout.world_size == 1:
            keys = ids + per_slot(layout.slot_shifts_SW[:, 0])
        elif layout.slot_blocks_S is not None:
            owner = torch.div(ids, per_slot(layout.slot_blocks_S), rounding_mode="floor")
            keys = ids + per_slot.pick(layout.slot_shifts_SW, owner)
        else:
            keys = ids + per_slot(layout.slot_shifts_SW[:, 0])
            steps_SW = layout.slot_shifts_SW.diff(dim=1)
            for r in range(1, layout.world_size):  # uneven ranges are rare, and hand-made
                is_behind = ids >= per_slot(layout.slot_starts_SW[:, r])
                keys += is_behind * per_slot(steps_SW[:, r - 1])
        return keys.reshape(-1).to(layout.key_dtype), bad

    def describe_bad_ids(self, ids_N: torch.Tensor, counts: Sequence[int]) -> str | None:
        """Returns the error message for the first out-of-range id; for the error path only."""
        return self._ids.describe_bad(ids_N, counts)
