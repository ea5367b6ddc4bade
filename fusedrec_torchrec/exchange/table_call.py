"""The lookup in one physical table: one FBGEMM call, some if there are very many ids."""

import torch

from fusedrec_torchrec.compat.bucket_table import BucketKernel
from fusedrec_torchrec.exchange.asked import Asked, joined
from fusedrec_torchrec.exchange.buckets import PhysicalTable
from fusedrec_torchrec.exchange.context import ReceivedRows
from fusedrec_torchrec.exchange.large_lookups import TableLookup

__all__ = ["TableCall"]


class TableCall:
    """Looks up what is asked of one physical table.

    Args:
        table: which buckets are in it.
        kernel: its rows on this rank.

    Attributes:
        buckets: numbers of the buckets whose units it gives, ascending.
    """

    def __init__(self, table: PhysicalTable, kernel: BucketKernel) -> None:
        self._table = table
        self._kernel = kernel
        self.buckets = table.buckets

    def asked(self, of_buckets: list[Asked], received: ReceivedRows) -> Asked:
        """Returns what is asked of the table, requester after requester.

        Args:
            of_buckets: what is asked of each bucket.
            received: the batch.
        """
        rows, bags = self._table.rows, self._table.bags
        if rows is None or bags is None:
            (bucket,) = self.buckets
            return of_buckets[bucket]
        context = received.context
        row_buckets = len(context.counts_in[0]) - len(context.ids_in[0])
        return joined(
            of_buckets[rows],
            of_buckets[bags],
            [row[rows] for row in context.counts_in],
            [row[bags] for row in context.counts_in],
            [row[bags - row_buckets] for row in context.ids_in],
        )

    def look_up(self, asked: Asked, counts: list[list[int]]) -> torch.Tensor:
        """Returns what is asked, [units, columns].

        Args:
            asked: of the table.
            counts: [requester][bucket] units.
        """
        by_table = None
        rows, bags = self._table.rows, self._table.bags
        if rows is None and bags is not None and self._kernel.can_show_tables:
            units = [row[bags] for row in counts]
            by_table = TableLookup.of(asked, units, self._kernel.table_starts_T)
        if by_table is None:
            return self._kernel(asked.rows_R, asked.offsets_U1, asked.weights_R)
        return by_table.look_up(
            lambda tables, of_tables: self._kernel.look_up_tables(
                tables, of_tables.rows_R, of_tables.offsets_U1, of_tables.weights_R
            )
        )
