"""Which rows a rank's lookups have used in training, since the last sync."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from fusedrec_torchrec.core import operators
from fusedrec_torchrec.core.transfer import used_on_this_stream
from fusedrec_torchrec.grid.tables import TableRows

__all__ = ["ROWS_PER_USE", "TouchedRows", "distinct", "distinct_and_padding"]

# Up to here a bit for every row is faster than to sort the rows that were used.
ROWS_PER_USE = 64
LEAST_KEPT = 1 << 20  # row numbers


def distinct(numbers: torch.Tensor, rows: int) -> torch.Tensor:
    """Returns row numbers in ascending order, each once.

    Args:
        numbers: in [0, rows), in any order.
        rows: how many there are.
    """
    if rows > ROWS_PER_USE * numbers.numel():
        return numbers.long().unique()
    used = torch.zeros(rows, dtype=torch.bool, device=numbers.device)
    return used.index_fill_(0, numbers.long(), True).nonzero().flatten()


def distinct_and_padding(numbers: torch.Tensor, rows: int) -> torch.Tensor:
    """Returns row numbers in ascending order, each once, and ``rows`` behind the last one.

    What it returns has at most as many elements as there are numbers, so that nobody waits for a
    device to know how many.

    Args:
        numbers: in [0, rows), in any order.
        rows: how many there are.
    """
    if rows > ROWS_PER_USE * numbers.numel():
        ascending = numbers.long().sort().values
        again = ascending[1:] == ascending[:-1]
        ascending[1:].masked_fill_(again, rows)
        return ascending.sort().values
    used = torch.zeros(rows, dtype=torch.bool, device=numbers.device)
    used.index_fill_(0, numbers.long(), True)
    return torch.nonzero_static(used, size=min(numbers.numel(), rows), fill_value=rows).flatten()


class TouchedRows:
    """Listens to the lookups of tables.

    A row that is looked up with gradients will be updated; one that is not keeps its value, on all
    replicas.  So these are all the rows in which replicas may differ.

    Args:
        tables: whose lookups count.
        rows: of all tables together.
    """

    def __init__(self, tables: Sequence[TableRows], rows: int) -> None:
        self._rows = rows
        self._seen: list[tuple[torch.Tensor, int]] = []  # numbers, and what is added to them
        self._size = 0
        self._most = max(rows // 8, LEAST_KEPT)
        self._is_touched: torch.Tensor | None = None  # of each row, once there are many
        for table in tables:
            table.listen(_Listener(self, table))

    def add(self, numbers: torch.Tensor, first_row: int = 0) -> None:
        """Takes rows, by their number among all rows of the rank.

        Args:
            numbers: of the rows, which nobody will change.
            first_row: what is to be added to them.
        """
        self._seen.append((numbers, first_row))
        self._size += numbers.numel()
        if self._size > self._most:  # bounds the memory between syncs: a byte for each row
            self._note()

    def _note(self) -> None:
        if self._is_touched is None:
            self._is_touched = self._seen[0][0].new_zeros(self._rows, dtype=torch.bool)
        for numbers in self._numbers():
            self._is_touched.index_fill_(0, numbers.long(), True)
        self._seen, self._size = [], 0

    def rows(self) -> torch.Tensor:
        """Returns the rows used so far, each once, in ascending order.

        Behind them there may be the number of all rows, any number of times.
        """
        if self._is_touched is not None:
            self._note()
            return self._is_touched.nonzero().flatten()
        if not self._seen:
            return torch.empty(0, dtype=torch.int64)
        seen = self._numbers()
        numbers = torch.cat(seen) if len(seen) > 1 else seen[0]
        find = distinct if numbers.device.type == "cpu" else distinct_and_padding
        return find(numbers, self._rows)

    def message(self, ends_B: torch.Tensor, room: int) -> torch.Tensor:
        """Returns how many rows were used up to the end of each block, and behind that the rows.

        On CUDA the host does not wait, unless very many rows were used since the last sync.

        Args:
            ends_B: the end of each block of rows.
            room: how many rows there is room for, at least; more if more were used.
        """
        device, blocks = ends_B.device, ends_B.numel()
        by_kernels = device.type == "cuda" and operators.available_on(device, "list_touched")
        if by_kernels and self._is_touched is None and self._rows <= ROWS_PER_USE * self._size:
            numbers, first_rows = zip(*self._seen, strict=True)
            used_on_this_stream(*numbers)
            own: torch.Tensor = torch.ops.fusedrec.list_touched(
                list(numbers), list(first_rows), ends_B, self._rows, room
            )
            return own
        touched = self.rows().to(device)
        own = torch.zeros(blocks + max(room, touched.numel()), dtype=torch.int32, device=device)
        own[:blocks] = torch.searchsorted(touched, ends_B)
        own[blocks : blocks + touched.numel()] = touched
        return own

    def _numbers(self) -> list[torch.Tensor]:
        return [numbers + first if first else numbers for numbers, first in self._seen]

    def clear(self) -> None:
        self._seen, self._size = [], 0
        self._is_touched = None


class _Listener:
    """Called before each lookup of a table."""

    def __init__(self, touched: TouchedRows, table: TableRows) -> None:
        self._touched = touched
        self._table = table

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        if not torch.is_grad_enabled():
            return
        indices, offsets = (*args, kwargs.get("indices"), kwargs.get("offsets"))[:2]
        sizes = kwargs.get("batch_size_per_feature_per_rank")
        numbers = self._table.row_numbers(indices, offsets, sizes)
        self._touched.add(numbers, self._table.first_row)
