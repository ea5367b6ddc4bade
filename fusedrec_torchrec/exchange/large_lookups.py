"""Lookups of long bags on CPU: FBGEMM is shown the tables of a bucket, not their rows as one table.

FBGEMM sorts the ids of a table before it updates rows, and the more rows the table has, the longer
that takes.  So very long bags are cheaper to look up table by table, in one call, as stock
shardings do it.  Bags must change their order for that, and be as many for each table, so tables
whose numbers of bags differ very much go into calls of their own.  That costs more than it saves if
bags have less than about 50 ids; with 100 ids, a step of 26 tables on two ranks takes 5 to 12 %
less CPU time.

Shape suffixes: W requesters, T tables of the bucket on this rank, U bags, R ids, D columns.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd import Function

from fusedrec_torchrec.core import operators
from fusedrec_torchrec.exchange.asked import Asked
from fusedrec_torchrec.exchange.gradients import first_order

__all__ = ["TableLookup", "TablePart"]

LONG = 64  # ids of a bag, in the mean
SMALLEST = 1 << 18  # ids; with fewer the sort is not what takes time
CALL = 8192  # bags of no ids that take as long as one more call

LookUpTables = Callable[[Sequence[int], Asked], torch.Tensor]


@dataclass(frozen=True)
class TablePart:
    """The bags of some tables.

    Attributes:
        tables: their numbers in the bucket.
        asked: as many bags of each table, some of them empty, with rows of the table.
        units_C: for each cell of what is looked up, [bag, table], which of all bags is there; the
            first for those that are empty.
    """

    tables: list[int]
    asked: Asked
    units_C: torch.Tensor


@dataclass(frozen=True)
class TableLookup:
    """What requesters ask of a bucket, by tables.

    Attributes:
        parts: the bags of all tables.
        cells_U: where each bag is among the cells of all parts.
    """

    parts: list[TablePart]
    cells_U: torch.Tensor

    @classmethod
    def of(
        cls, asked: Asked, units_of_rank: Sequence[int], table_starts_T: torch.Tensor
    ) -> "TableLookup | None":
        """Returns it; None if one table is as good, or if bags do not come table after table.

        Args:
            asked: bags of the bucket's tables, none of them empty, requester after requester.
            units_of_rank: how many bags each requester asks for.
            table_starts_T: the first local row of each table.
        """
        ids, tables = asked.rows_R.numel(), table_starts_T.numel()
        if asked.lengths_U is None or tables < 2:
            return None
        if ids < SMALLEST or ids < LONG * asked.lengths_U.numel():
            return None
        assert asked.offsets_U1 is not None
        ranks, offsets_U1 = len(units_of_rank), asked.offsets_U1.long()
        first_U = asked.rows_R.index_select(0, offsets_U1[:-1])
        table_U = torch.bucketize(first_U, table_starts_T, right=True) - 1
        requester_U = torch.arange(ranks).repeat_interleave(torch.tensor(units_of_rank))
        piece_U = requester_U * tables + table_U
        if bool((piece_U.diff() < 0).any()):
            return None
        units_WT = torch.bincount(piece_U, minlength=ranks * tables).view(ranks, tables)
        ends_WT = units_WT.flatten().cumsum(0)
        # The number of a bag among those of its table.
        shifts_WT = (units_WT.cumsum(0) - units_WT).flatten() - (ends_WT - units_WT.flatten())
        unit_U = torch.arange(piece_U.numel())
        number_U = unit_U + shifts_WT.index_select(0, piece_U)

        id_sizes = offsets_U1[ends_WT].diff(prepend=ends_WT.new_zeros(1)).tolist()
        pieces = _Pieces(asked, tables, id_sizes, table_starts_T.tolist())
        units_T: list[int] = units_WT.sum(0).tolist()
        groups = _groups(units_T)
        # Of each table: how many bags its part has of every table, which of them it is, how many
        # there are, and the part's first cell.
        bags_T, place_T, width_T, first_T = torch.zeros(4, tables, dtype=torch.int64)
        first = 0
        for group in groups:
            bags = max(units_T[table] for table in group)
            bags_T[group], width_T[group], first_T[group] = bags, len(group), first
            place_T[group] = torch.arange(len(group))
            first += len(group) * bags
        cells_U = (first_T[table_U] + number_U * width_T[table_U] + place_T[table_U]).int()
        lengths_C = asked.lengths_U.new_zeros(first)
        lengths_C[(first_T + place_T * bags_T)[table_U] + number_U] = asked.lengths_U
        units_C = torch.zeros(first, dtype=torch.int32)
        units_C[cells_U.long()] = unit_U.int()

        sizes = [len(group) * max(units_T[table] for table in group) for group in groups]
        parts = []
        for group, lengths, units in zip(
            groups, lengths_C.split(sizes), units_C.split(sizes), strict=True
        ):
            parts.append(TablePart(group, pieces.asked(group, lengths), units))
        return cls(parts, cells_U)

    def look_up(self, look_up_tables: LookUpTables) -> torch.Tensor:
        """Returns the bags in the order in which they are asked for.

        Args:
            look_up_tables: looks up as many bags of each of some tables, [bag, columns of all].
        """
        pooled = [look_up_tables(part.tables, part.asked) for part in self.parts]
        in_order: torch.Tensor = _InOrder.apply(self, *pooled)
        return in_order


class _Pieces:
    """The ids of each table, by requester.

    Args:
        asked: the ids, requester after requester, table after table.
        tables: how many there are.
        id_sizes: ids of each requester and table.
        starts: the first local row of each table.
    """

    def __init__(
        self, asked: Asked, tables: int, id_sizes: Sequence[int], starts: Sequence[int]
    ) -> None:
        self._tables = tables
        self._starts = starts
        self._sizes = id_sizes
        self._rows = asked.rows_R.split(id_sizes)
        self._weights = None if asked.weights_R is None else asked.weights_R.split(id_sizes)

    def asked(self, group: Sequence[int], lengths: torch.Tensor) -> Asked:
        """Returns the ids of some tables, table after table, as rows of these."""
        rows = torch.cat([piece for table in group for piece in self._rows[table :: self._tables]])
        sizes = [sum(self._sizes[table :: self._tables]) for table in group]
        for own, table in zip(rows.split(sizes), group, strict=True):
            own -= self._starts[table]
        weights = None
        if self._weights is not None:
            weights = torch.cat(
                [piece for table in group for piece in self._weights[table :: self._tables]]
            )
        return Asked(rows, lengths, weights)


class _InOrder(Function):
    """Brings the bags of all parts into one order, and their gradients back."""

    @staticmethod
    def forward(ctx: Any, lookup: TableLookup, *pooled: torch.Tensor) -> torch.Tensor:
        ctx.parts = lookup.parts
        dim = pooled[0].size(1) // len(lookup.parts[0].tables)
        cells = [bags.view(-1, dim) for bags in pooled]
        return _rows(cells[0] if len(cells) == 1 else torch.cat(cells), lookup.cells_U)

    @staticmethod
    @first_order
    def backward(ctx: Any, gradient_UD: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        gradient_UD = gradient_UD.contiguous()
        # Nobody reads the gradient of a bag of no ids.
        return None, *(
            _rows(gradient_UD, part.units_C).view(-1, len(part.tables) * gradient_UD.size(1))
            for part in ctx.parts
        )


def _rows(source: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """Returns some rows of a matrix; the operator of ours writes past the cache."""
    if source.dtype != torch.float32 or not operators.available_on(source.device, "bag_sums"):
        return source.index_select(0, rows)
    out = source.new_empty(rows.numel(), source.size(1))
    torch.ops.fusedrec.bag_sums(
        source.view(-1), None, source.size(1), rows, None, None, None, 1, 0, out
    )
    return out


def _groups(units_T: Sequence[int]) -> list[list[int]]:
    """Returns the tables that have any bags, in groups with about as many each."""
    groups: list[list[int]] = []
    empty = 0
    for table in sorted(range(len(units_T)), key=lambda table: -units_T[table]):
        if not units_T[table]:
            break
        if groups:
            empty += units_T[groups[-1][0]] - units_T[table]
        if not groups or empty > CALL:
            groups.append([])
            empty = 0
        groups[-1].append(table)
    return [sorted(group) for group in groups]
