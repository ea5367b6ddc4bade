"""Ids to keys of the fused key space, and the check that every id is in its table's range.

FBGEMM maps an out-of-range id to row 0 and goes on training; here it is an error.  The check
stays on the device: its verdict travels in the status word of the input dist, so nothing waits
for it and every rank learns of it in the same step.
"""

from collections.abc import Sequence

import torch

from fusedrec_torchrec.core import native
from fusedrec_torchrec.core.transfer import to_device
from fusedrec_torchrec.exchange.hashing import hash_ids, table_salt
from fusedrec_torchrec.exchange.layout import ExchangeLayout
from fusedrec_torchrec.exchange.options import ExchangeOptions

__all__ = ["KeySpace"]


class KeySpace:
    """Turns the ids of a batch, slot after slot, into keys."""

    def __init__(self, layout: ExchangeLayout, options: ExchangeOptions) -> None:
        self._layout = layout
        hashed = [options.hashes(table) for _, table in layout.slot_names]
        self._all_hashed = bool(hashed) and all(hashed)
        self._any_hashed = any(hashed)
        self._hashed_S = torch.tensor(hashed, device=layout.device)
        self._salts_S = torch.tensor(
            [table_salt(table, options.hash_seed) for _, table in layout.slot_names],
            dtype=torch.int64,
            device=layout.device,
        )
        self._native = native.available_on(layout.device)

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
        if self._any_hashed:
            ids_N = self._hashed(ids_N, _PerSlot(counts, ids_N.device))
        if self._native:
            keys_N, bad = torch.ops.fusedrec.keys(
                ids_N.contiguous(),
                to_device(counts, ids_N.device),
                layout.slot_rows_S,
                layout.slot_starts_SW,
                layout.slot_shifts_SW,
                layout.key_dtype,
            )
            return keys_N, bad
        per_slot = _PerSlot(counts, ids_N.device)
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

    def _hashed(self, ids_N: torch.Tensor, per_slot: "_PerSlot") -> torch.Tensor:
        ids = per_slot.view(ids_N)
        hashed = hash_ids(ids, per_slot(self._salts_S), per_slot(self._layout.slot_rows_S))
        if not self._all_hashed:
            hashed = torch.where(per_slot(self._hashed_S), hashed, ids.long())
        return hashed.reshape(-1)

    def describe_bad_ids(self, ids_N: torch.Tensor, counts: Sequence[int]) -> str:
        """Returns the error message for the first out-of-range id; for the error path only."""
        start = 0
        for s, count in enumerate(counts):
            ids = ids_N[start : start + count]
            rows = int(self._layout.slot_rows_S[s])
            bad = ((ids < 0) | (ids >= rows)).nonzero().flatten()
            if not bool(self._hashed_S[s]) and bad.numel():
                feature, table = self._layout.slot_names[s]
                more = f" ({bad.numel()} such ids in this feature)" if bad.numel() > 1 else ""
                return (
                    f"feature {feature!r} of table {table!r}: id {int(ids[bad[0]])} at position "
                    f"{int(bad[0])} is out of range [0, {rows}){more}"
                )
            start += count
        raise AssertionError("describe_bad_ids was called on good ids")


class _PerSlot:
    """Values of the slots, for every id; without a copy for each if all slots have equally many."""

    def __init__(self, counts: Sequence[int], device: torch.device) -> None:
        self._shape = (len(counts), counts[0]) if len(set(counts)) == 1 else None
        if self._shape is None:
            slots = torch.arange(len(counts), device=device)
            self._slot_N = slots.repeat_interleave(
                to_device(counts, device), output_size=sum(counts)
            )

    def view(self, ids_N: torch.Tensor) -> torch.Tensor:
        """Returns the ids in a shape that goes with the values."""
        return ids_N if self._shape is None else ids_N.view(self._shape)

    def __call__(self, values_S: torch.Tensor) -> torch.Tensor:
        if self._shape is not None:
            return values_S[:, None]
        return values_S.index_select(0, self._slot_N)

    def pick(self, values_SW: torch.Tensor, column: torch.Tensor) -> torch.Tensor:
        """Returns ``values_SW[slot of the id, column of the id]``."""
        if self._shape is not None:
            return values_SW.gather(1, column.long())
        width = values_SW.size(1)
        return values_SW.reshape(-1).index_select(0, self._slot_N * width + column)
