"""The FBGEMM tables of a model, as the rows that replicas have in common."""

from collections.abc import Iterator, Sequence
from itertools import accumulate

import torch
from torch import nn

from fusedrec_torchrec.compat.bucket_table import BucketTable, LookupListener
from fusedrec_torchrec.compat.fbgemm_table import (
    FbgemmTable,
    device_of,
    is_cached,
    tables_of_features,
)
from fusedrec_torchrec.compat.lookups import lookups_of

__all__ = ["Block", "TableRows", "fbgemm_tables"]


def fbgemm_tables(model: nn.Module) -> list[FbgemmTable]:
    """Returns all sharded tables that are trained in backward, in the same order on all ranks."""
    modules = (module for lookup in lookups_of(model) for module in lookup.modules())
    tables = (module for module in modules if isinstance(module, FbgemmTable))
    return [table for table in tables if not getattr(table, "frozen", False)]


class Block:
    """Rows of one width: weights, and optimizer state if it is synced, too.

    Args:
        first_row: number of the first row among all rows of the rank.
        tensors: [rows, columns] each; views that share the table's memory.
    """

    def __init__(self, first_row: int, tensors: Sequence[torch.Tensor]) -> None:
        self.first_row = first_row
        self.tensors = list(tensors)
        self.rows = tensors[0].size(0)
        self.row_bytes = sum(t.size(1) * t.itemsize for t in tensors)

    @property
    def end_row(self) -> int:
        return self.first_row + self.rows


class TableRows:
    """One FBGEMM table, which may be of several tables of TorchRec's.

    Args:
        table: FBGEMM's.
        first_row: number of its first row among all rows of the rank.
        optimizer_state: whether blocks have the optimizer's state.
    """

    def __init__(self, table: FbgemmTable, first_row: int, optimizer_state: bool) -> None:
        self.table = table
        self.first_row = first_row
        weights = [weight.detach() for weight in table.split_embedding_weights()]
        states: list[tuple[torch.Tensor, ...]] = [()] * len(weights)
        if optimizer_state:
            states = [_floats(of_table) for of_table in table.split_optimizer_states()] or states
        self.row_counts = [weight.size(0) for weight in weights]
        self.rows = sum(self.row_counts)
        per_table = [
            [_matrix(t, weight.size(0)) for t in (weight, *state)]
            for weight, state in zip(weights, states, strict=True)
        ]
        self.blocks = list(_blocks(first_row, per_table))
        self._starts = list(accumulate(self.row_counts, initial=0))
        # Our buckets are one table with one feature, and ids that were checked; their tables may
        # all be on other ranks.
        is_bucket = isinstance(table, BucketTable)
        self._features = self._features_of([] if is_bucket else tables_of_features(table))

    def _features_of(self, tables_F: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns first row and number of rows of the table of each feature."""
        device = device_of(self.table)
        start_F = torch.tensor([self._starts[t] for t in tables_F], device=device)
        rows_F = torch.tensor([self.row_counts[t] for t in tables_F], device=device)
        return start_F, rows_F

    @property
    def is_cached(self) -> bool:
        """Whether the device has a cache of rows in host memory."""
        return is_cached(self.table)

    def listen(self, listener: LookupListener) -> None:
        """Has a function called before every lookup of rows of this table."""
        if isinstance(self.table, BucketTable):
            self.table.listen(listener)
        else:
            self.table.register_forward_pre_hook(listener, with_kwargs=True)

    def row_numbers(
        self,
        indices_N: torch.Tensor,
        offsets: torch.Tensor | None,
        batch_size_per_feature_per_rank: list[list[int]] | None,
    ) -> torch.Tensor:
        """Returns the rows that a lookup uses, numbered within this table.

        Buckets need no offsets, unless they show their tables.
        """
        of_features = self._features
        if isinstance(self.table, BucketTable):
            if not self.table.shown_tables:
                return indices_N
            of_features = self._features_of(self.table.shown_tables)
        assert offsets is not None
        features = of_features[0].numel()
        if batch_size_per_feature_per_rank is None:
            bags = (offsets.numel() - 1) // features
            ends = offsets[bags::bags] if bags else offsets.new_zeros(features)
        else:
            sizes = list(accumulate(sum(row) for row in batch_size_per_feature_per_rank))
            ends = offsets[sizes]
        counts_F = torch.diff(ends.long(), prepend=ends.new_zeros(1, dtype=torch.int64))
        start_N, rows_N = (
            values_F.repeat_interleave(counts_F, output_size=indices_N.numel())
            for values_F in of_features
        )
        # FBGEMM takes the first row for an id that is out of range.
        ids_N = indices_N.long()
        return start_N + torch.where((ids_N < 0) | (ids_N >= rows_N), 0, ids_N)


def _floats(state: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """Returns the states that can be averaged: not counters and step numbers."""
    return tuple(t.detach() for t in state if t.is_floating_point() and t.numel())


def _matrix(tensor: torch.Tensor, rows: int) -> torch.Tensor:
    return tensor.view(rows, -1) if rows else tensor.view(0, max(tensor.shape[-1], 1))


def _blocks(first_row: int, per_table: Sequence[Sequence[torch.Tensor]]) -> Iterator[Block]:
    """Yields one block for all tables if they are alike and one behind another in memory."""
    per_table = [tensors for tensors in per_table if tensors[0].size(0)]
    if not per_table:
        return
    if all(map(_one_behind_another, zip(*per_table, strict=True))):
        rows = sum(tensors[0].size(0) for tensors in per_table)
        whole = [t.as_strided((rows, t.size(1)), (t.size(1), 1)) for t in per_table[0]]
        yield Block(first_row, whole)
        return
    for tensors in per_table:
        yield Block(first_row, tensors)
        first_row += tensors[0].size(0)


def _one_behind_another(matrices: Sequence[torch.Tensor]) -> bool:
    first = matrices[0]
    address = first.data_ptr()
    for matrix in matrices:
        if (
            matrix.size(1) != first.size(1)
            or matrix.data_ptr() != address
            or not matrix.is_contiguous()
        ):
            return False
        address += matrix.nbytes
    return True
