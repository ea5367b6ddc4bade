"""The ids of a batch, slot after slot: hashing of raw ids, and what is said of ids out of range."""

from collections.abc import Sequence

import torch

from fusedrec_torchrec.core import native
from fusedrec_torchrec.core.transfer import to_device
from fusedrec_torchrec.exchange.hashing import hash_ids, table_salt
from fusedrec_torchrec.exchange.options import ExchangeOptions

__all__ = ["PerSlot", "SlotIds"]


class SlotIds:
    """Turns ids into rows of their tables.

    Args:
        slot_names: feature and table of each slot.
        rows: of each slot's table.
        options: say which tables have raw ids.
        device: of the ids.
    """

    def __init__(
        self,
        slot_names: Sequence[tuple[str, str]],
        rows: Sequence[int],
        options: ExchangeOptions,
        device: torch.device,
    ) -> None:
        self._slot_names = slot_names
        self._hashed = [options.hashes(table) for _, table in slot_names]
        self._hashed_S = torch.tensor(self._hashed, device=device)
        self.rows_S = torch.tensor(rows, dtype=torch.int64, device=device)
        self._salts_S = torch.tensor(
            [table_salt(table, options.hash_seed) for _, table in slot_names],
            dtype=torch.int64,
            device=device,
        )
        self._native = native.available_on(device)
        # For the kernels: whether ids are raw, and their salt.
        self.salts_S2 = (
            torch.stack([self._hashed_S.long(), self._salts_S], 1) if any(self._hashed) else None
        )

    def hashed(self, ids_N: torch.Tensor, counts: Sequence[int]) -> torch.Tensor:
        """Returns the ids, those of tables with raw ids hashed to rows.

        Args:
            ids_N: int32 or int64 ids, grouped by slot.
            counts: the number of ids of each slot.
        """
        if not any(self._hashed):
            return ids_N
        per_slot = PerSlot(counts, ids_N.device)
        ids = per_slot.view(ids_N)
        hashed = hash_ids(ids, per_slot(self._salts_S), per_slot(self.rows_S))
        if not all(self._hashed):
            hashed = torch.where(per_slot(self._hashed_S), hashed, ids.long())
        return hashed.reshape(-1)

    def rows(self, ids_N: torch.Tensor, counts: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the rows of the ids, and whether any id is out of its table's range.

        If there are out-of-range ids, rows mean nothing.
        """
        rows_N = self.hashed(ids_N, counts)
        if self._native:
            good = torch.ops.fusedrec.in_range(
                rows_N.contiguous(), to_device(counts, rows_N.device), self.rows_S
            )
            return rows_N, torch.tensor(not good)
        per_slot = PerSlot(counts, rows_N.device)
        rows = per_slot.view(rows_N)
        return rows_N, ((rows < 0) | (rows >= per_slot(self.rows_S))).any()

    def describe_bad(self, ids_N: torch.Tensor, counts: Sequence[int]) -> str | None:
        """Returns the error message for the first out-of-range id; None if all are in range.

        For the error path only.  The ids are those of the batch, not hashed.
        """
        start = 0
        for s, count in enumerate(counts):
            ids = ids_N[start : start + count]
            rows = int(self.rows_S[s])
            bad = ((ids < 0) | (ids >= rows)).nonzero().flatten()
            if not self._hashed[s] and bad.numel():
                feature, table = self._slot_names[s]
                more = f" ({bad.numel()} such ids in this feature)" if bad.numel() > 1 else ""
                return (
                    f"feature {feature!r} of table {table!r}: id {int(ids[bad[0]])} at position "
                    f"{int(bad[0])} is out of range [0, {rows}){more}"
                )
            start += count
        return None


class PerSlot:
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
