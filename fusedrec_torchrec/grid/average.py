"""The sync of replicas: rows become their average over the groups.

Replicas of a row differ only if some group has used the row since the last sync.  So:

1. every replica sends the numbers of the rows it has used, in ONE all-gather: messages have a fixed
   capacity and a header with the counts, as the ids' messages of the fused exchange have.  On CUDA
   kernels unite them before the host reads all headers and the size of the union, in one wait;
2. the rows that any of them has used are summed in ONE all-reduce (one more for half precision) and
   divided by the number of replicas.

All replicas know from the headers how many rows travel.  If whole shards are fewer bytes than rows
and their numbers, whole shards are averaged.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
import torch.distributed as dist

from fusedrec_torchrec.core import operators
from fusedrec_torchrec.core.buffers import Buffers
from fusedrec_torchrec.core.lost_rank import wait, waiting
from fusedrec_torchrec.core.transfer import to_host
from fusedrec_torchrec.exchange.capacity import Capacity
from fusedrec_torchrec.exchange.options import ExchangeOptions
from fusedrec_torchrec.grid.tables import Block
from fusedrec_torchrec.grid.touched import ROWS_PER_USE, TouchedRows, distinct

__all__ = ["Average", "Syncs"]

NUMBER_BYTES = 4
INT32_MAX = torch.iinfo(torch.int32).max


@dataclass
class Syncs:
    """What syncs have done so far, on this rank.

    Attributes:
        sparse: syncs of rows.
        dense: syncs of whole shards.
        rows: that were averaged.
        all_rows: that whole shards would have had.
    """

    sparse: int = 0
    dense: int = 0
    rows: int = 0
    all_rows: int = 0


@dataclass
class _InFlight:
    """Sums on their way.

    Attributes:
        works: to wait for.
        rows: of each block, numbers of the rows; None for all rows.
        sums: by number type, of all blocks; None if the tables themselves are summed up.
        sent: what this rank has added to the sums; None if nobody asks.
    """

    works: list[dist.Work]
    rows: list[torch.Tensor] | None
    sums: dict[torch.dtype, torch.Tensor] | None
    sent: dict[torch.dtype, torch.Tensor] | None


class Average:
    """Averages rows over replicas.

    Args:
        pg: the replicas of this rank's shards.
        blocks: the rows.
        rows: number of all rows.
        keeps_sent: whether later updates of the rows are to be kept, see ``finish``.
    """

    def __init__(
        self, pg: dist.ProcessGroup, blocks: Sequence[Block], rows: int, keeps_sent: bool = False
    ) -> None:
        assert rows <= INT32_MAX, "row numbers travel as int32"
        self._pg = pg
        self._blocks = blocks
        self._rows = rows
        self._keeps_sent = keeps_sent
        self._capacity = Capacity(ExchangeOptions())
        self._buffers = Buffers()
        self._in_flight: _InFlight | None = None
        device = blocks[0].tensors[0].device if blocks else None
        self._ends_B = torch.tensor([block.end_row for block in blocks], device=device)
        self.done = Syncs()

    @property
    def under_way(self) -> bool:
        return self._in_flight is not None

    @property
    def _device(self) -> torch.device:
        return self._blocks[0].tensors[0].device

    @property
    def _all_bytes(self) -> int:
        return sum(block.rows * block.row_bytes for block in self._blocks)

    def start(self, touched: TouchedRows | None) -> None:
        """Sends rows off.

        Args:
            touched: rows that this rank has used; None to average all rows.
        """
        assert self._in_flight is None
        if not self._blocks:
            return
        rows = None if touched is None else self._union(touched)
        if rows is None and self._keeps_sent:  # tables must not change under way
            everything = torch.arange(self._rows, device=self._device)
            rows = list(everything.split([block.rows for block in self._blocks]))
        self.done.all_rows += self._rows
        if rows is None:
            self.done.dense += 1
            self.done.rows += self._rows
            self._in_flight = self._send_all()
        else:
            self.done.sparse += 1
            self.done.rows += sum(of_block.numel() for of_block in rows)
            self._in_flight = self._send(rows)

    def finish(self, touched_since: torch.Tensor | None = None) -> None:
        """Waits for the sums and writes the averages.

        Args:
            touched_since: rows that this rank has used since ``start``, if there are any.  What
                they have been updated by is kept, on top of the average.
        """
        if self._in_flight is None:
            return
        arrived, self._in_flight = self._in_flight, None
        for work in arrived.works:
            wait(work, self._pg, "2D sync")
        if arrived.sums is None:
            for block in self._blocks:
                for tensor in block.tensors:
                    tensor.div_(self._pg.size())
            return
        assert arrived.rows is not None
        # Kernels divide as they write.
        by_kernels = touched_since is None and self._has_kernels("write_means")
        if not by_kernels:
            for sums in arrived.sums.values():
                sums.div_(self._pg.size())
        if touched_since is not None:
            self._keep_updates(arrived, touched_since.to(self._device))
        for block, rows, means in zip(
            self._blocks, arrived.rows, self._views(arrived.sums, arrived.rows), strict=True
        ):
            for tensor, mean in zip(block.tensors, means, strict=True):
                if by_kernels:
                    torch.ops.fusedrec.write_means(
                        mean, rows, block.first_row, self._pg.size(), tensor
                    )
                else:
                    tensor.index_copy_(0, _places(block, rows).long(), mean)

    def _has_kernels(self, *names: str) -> bool:
        device = self._device
        return device.type == "cuda" and operators.available_on(device, *names)

    # ------------------------------------------------------------ which rows

    def _union(self, touched: TouchedRows) -> list[torch.Tensor] | None:
        """Returns rows of each block that any replica has used, in ascending order.

        None if whole shards are fewer bytes.
        """
        blocks, capacity = len(self._blocks), self._capacity.current
        own = touched.message(self._ends_B, capacity)
        messages = self._gather(own[: blocks + capacity])
        headers, rows = self._read(messages)
        totals = [header[-1] for header in headers[: self._pg.size()]]
        if self._whole_is_less(headers[: self._pg.size()]):
            self._capacity.clear()  # a header is all it takes to find out again
            return None
        self._capacity.update(max(self._capacity.wanted(total) for total in totals))
        if max(totals) > capacity:
            missing = blocks + max(totals) - own.numel()
            if missing > 0:
                own = torch.nn.functional.pad(own, (0, missing))
            messages = self._gather(own[: blocks + max(totals)])
            headers, rows = self._read(messages)
        if rows is not None:
            sizes = _differences(headers[-1])
            return list(rows[: sum(sizes)].split(sizes))
        numbers = [
            message[blocks : blocks + total]
            for message, total in zip(messages, totals, strict=True)
        ]
        union = distinct(torch.cat(numbers), self._rows)
        ends = [union.numel()]
        if blocks > 1:
            ends = to_host(torch.searchsorted(union, self._ends_B))
        return list(union.split(_differences(ends)))

    def _read(self, messages: torch.Tensor) -> tuple[list[list[int]], torch.Tensor | None]:
        """Returns the headers of all messages; if kernels unite them, also the union's.

        The rows of the union are returned, too, if it is there; there may be anything behind them.
        """
        blocks, rows = len(self._blocks), None
        room = messages.numel() - blocks * self._pg.size()
        if room and self._rows <= ROWS_PER_USE * room and self._has_kernels("unite_touched"):
            flat, rows = torch.ops.fusedrec.unite_touched(messages, self._ends_B, self._rows)
        else:
            flat = messages[:, :blocks].flatten()
        words = to_host(flat)
        return [words[i : i + blocks] for i in range(0, len(words), blocks)], rows

    def _gather(self, own: torch.Tensor) -> torch.Tensor:
        gathered = own.new_empty(self._pg.size() * own.numel())
        with waiting(self._pg, "2D sync"):
            dist.all_gather_single(gathered, own, group=self._pg)
        return gathered.view(self._pg.size(), -1)

    def _whole_is_less(self, headers: Sequence[Sequence[int]]) -> bool:
        """Returns whether rows and their numbers are more bytes than whole shards."""
        ranks, rows_of_ranks = self._pg.size(), [_differences(header) for header in headers]
        numbers = (ranks - 1) * max(map(sum, rows_of_ranks)) * NUMBER_BYTES
        most = [max(row[b] for row in rows_of_ranks) for b in range(len(self._blocks))]
        rows = sum(n * b.row_bytes for n, b in zip(most, self._blocks, strict=True))
        both_ways = 2 * (ranks - 1) / ranks
        return numbers + both_ways * rows >= both_ways * self._all_bytes

    # ------------------------------------------------------------ rows

    def _send(self, rows: list[torch.Tensor]) -> _InFlight:
        sizes: dict[torch.dtype, int] = {}
        for block, of_block in zip(self._blocks, rows, strict=True):
            for t in block.tensors:
                sizes[t.dtype] = sizes.get(t.dtype, 0) + of_block.numel() * t.size(1)
        sums = {
            dtype: self._buffers.take(f"sums of {dtype}", (size,), dtype, self._device)
            for dtype, size in sizes.items()
        }
        for block, of_block, views in zip(self._blocks, rows, self._views(sums, rows), strict=True):
            place = _places(block, of_block)
            for tensor, view in zip(block.tensors, views, strict=True):
                torch.index_select(tensor, 0, place, out=view)
        sent = None
        if self._keeps_sent:
            sent = {dtype: flat.clone() for dtype, flat in sums.items()}
        works = [
            dist.all_reduce(flat, group=self._pg, async_op=True)
            for flat in sums.values()
            if flat.numel()
        ]
        return _InFlight(works, rows, sums, sent)

    def _views(
        self, flats: dict[torch.dtype, torch.Tensor], rows: Sequence[torch.Tensor]
    ) -> list[list[torch.Tensor]]:
        """Returns for each block the range of the flat buffers that each of its tensors has."""
        views, used = [], dict.fromkeys(flats, 0)
        for block, rows_R in zip(self._blocks, rows, strict=True):
            of_block = []
            for t in block.tensors:
                size = rows_R.numel() * t.size(1)
                elements = flats[t.dtype][used[t.dtype] : used[t.dtype] + size]
                of_block.append(elements.view(rows_R.numel(), t.size(1)))
                used[t.dtype] += size
            views.append(of_block)
        return views

    def _send_all(self) -> _InFlight:
        works = [
            dist.all_reduce(tensor, group=self._pg, async_op=True)
            for block in self._blocks
            for tensor in block.tensors
        ]
        return _InFlight(works, None, None, None)

    def _keep_updates(self, arrived: _InFlight, touched_since: torch.Tensor) -> None:
        """Adds to the averages what this rank's rows have changed since they were sent.

        Only to rows that were used since then: the others must be the average to the last bit,
        since nobody will sync them again.
        """
        assert arrived.rows is not None and arrived.sums is not None and arrived.sent is not None
        for block, rows, means, sent in zip(
            self._blocks,
            arrived.rows,
            self._views(arrived.sums, arrived.rows),
            self._views(arrived.sent, arrived.rows),
            strict=True,
        ):
            again = torch.isin(rows, touched_since).nonzero().flatten()
            places = _places(block, rows.index_select(0, again))
            for tensor, mean, before in zip(block.tensors, means, sent, strict=True):
                now = tensor.index_select(0, places)
                mean.index_add_(0, again, now - before.index_select(0, again))


def _places(block: Block, rows: torch.Tensor) -> torch.Tensor:
    """Returns which rows of a block these are."""
    return rows - block.first_row if block.first_row else rows


def _differences(ends: Sequence[int]) -> list[int]:
    """Returns how many there are in each block, of counts up to their ends."""
    return [end - begin for begin, end in pairwise([0, *ends])]
