"""Has FBGEMM see some tables of a bucket as tables of their own, for one lookup.

A lookup takes from the module where tables lie, how many rows and columns they have, and keeps that
for its backward pass.  So it is enough to show it other numbers while it is called.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate
from typing import Any

import torch
from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
    SplitTableBatchedEmbeddingBagsCodegen,
)

from fusedrec_torchrec.compat.optimizers import STATE_PREFIXES

__all__ = ["TableLayout"]


class TableLayout:
    """Some tables of a bucket on CPU, as FBGEMM lays them out.

    Args:
        table: the FBGEMM table of the bucket, which shows where each of the tables is, and tells
            listeners by ``shown_tables`` which of them a lookup is of.
        numbers: which of them; each must have rows.
    """

    def __init__(
        self, table: SplitTableBatchedEmbeddingBagsCodegen, numbers: Sequence[int]
    ) -> None:
        specs = [table.embedding_specs[number] for number in numbers]
        rows, dims = [spec[0] for spec in specs], [spec[1] for spec in specs]
        assert all(rows), "FBGEMM takes a table without rows for a part of the next one"
        self._table = table
        self._numbers: dict[str, Any] = {
            "shown_tables": tuple(numbers),
            "D_offsets": torch.tensor([0, *accumulate(dims)], dtype=torch.int32),
            "total_D": sum(dims),
            "hash_size_cumsum": torch.tensor([0, *accumulate(rows)]),
            "total_hash_size_bits": sum(rows).bit_length(),
        }
        for prefix in ("weights", *STATE_PREFIXES):
            if hasattr(table, f"{prefix}_physical_offsets"):
                for kind, dtype in (("offsets", torch.int64), ("placements", torch.int32)):
                    of_all = getattr(table, f"{prefix}_physical_{kind}")
                    self._numbers[f"{prefix}_{kind}"] = torch.tensor(
                        [int(of_all[number]) for number in numbers], dtype=dtype
                    )

    @contextmanager
    def shown(self) -> Iterator[None]:
        """Shows these tables to the lookups inside of it."""
        before = {name: getattr(self._table, name) for name in self._numbers}
        try:
            for name, value in self._numbers.items():
                setattr(self._table, name, value)
            yield
        finally:
            for name, value in before.items():
                setattr(self._table, name, value)
