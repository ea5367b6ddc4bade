"""Ids to keys of the fused key space, and the check that every id is in its table's range.

FBGEMM maps an out-of-range id to row 0 and goes on training; here it is an error.  The check
stays on the device: its verdict travels in the status word of the input dist, so nothing waits
for it and every rank learns of it in the same step.
"""

import torch

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

    def keys(
        self, ids_N: torch.Tensor, counts_S: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys of the ids, and whether any id is out of its table's range.

        Args:
            ids_N: int32 or int64 ids, grouped by slot.
            counts_S: the number of ids of each slot.

        Returns:
            keys_N of the layout's key dtype, and a 0-dim bool tensor, both on the ids' device.
            Keys of out-of-range ids are meaningless; the caller must not use any if there are.
        """
        layout = self._layout
        total = ids_N.numel()

        def per_id(values_S: torch.Tensor) -> torch.Tensor:
            return torch.repeat_interleave(values_S, counts_S, output_size=total)

        rows_N = per_id(layout.slot_rows_S)
        if self._any_hashed:
            hashed_N = hash_ids(ids_N, per_id(self._salts_S), rows_N)
            ids_N = (
                hashed_N
                if self._all_hashed
                else torch.where(per_id(self._hashed_S), hashed_N, ids_N.long())
            )
        bad = ((ids_N < 0) | (ids_N >= rows_N)).any()
        keys_N = (ids_N + per_id(layout.slot_key_bases_S)).to(layout.key_dtype)
        return keys_N, bad

    def describe_bad_ids(self, ids_N: torch.Tensor, counts_S: torch.Tensor) -> str:
        """The error message for the first out-of-range id; for the error path only."""
        start = 0
        for s, count in enumerate(counts_S.tolist()):
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
