"""When replicas are brought together, and which of their rows."""

import torch
import torch.distributed as dist
from torch import nn
from torch.profiler import record_function

from fusedrec_torchrec.grid.average import Average, Syncs
from fusedrec_torchrec.grid.groups import Groups
from fusedrec_torchrec.grid.options import GridOptions
from fusedrec_torchrec.grid.tables import TableRows, fbgemm_tables
from fusedrec_torchrec.grid.touched import TouchedRows

__all__ = ["ReplicaSync"]


class ReplicaSync:
    """The replicas of all tables of a model.

    Args:
        model: sharded over this rank's group.
        groups: this rank's place in the grid.
        options: the user's settings.
    """

    def __init__(self, model: nn.Module, groups: Groups, options: GridOptions) -> None:
        self._options = options
        self._pg = groups.replica_pg
        self._steps = 0  # since the last sync
        self._tables: list[TableRows] = []
        rows = 0
        for table in fbgemm_tables(model):
            self._tables.append(TableRows(table, rows, options.sync_optimizer_state))
            rows += self._tables[-1].rows
        blocks = [block for table in self._tables for block in table.blocks]
        self._touched = TouchedRows(self._tables, rows)
        self._average = Average(self._pg, blocks, rows, options.overlap == "one_step")
        if options.overlap == "until_lookup":
            for table in self._tables:
                table.table.register_forward_pre_hook(lambda *_: self.finish())
        self.begin_equal()

    @property
    def done(self) -> Syncs:
        """What syncs have done so far."""
        return self._average.done

    def step(self) -> None:
        """After a training step."""
        self._steps += 1
        if self._steps % self._options.sync_every == 0:
            self._sync()
            if self._options.overlap == "none":
                self.finish()

    def sync_now(self) -> None:
        self._sync()
        self.finish()

    def _sync(self) -> None:
        with record_function("fusedrec::sync"):
            self.finish()
            for table in self._cached():
                table.table.flush()
            self._average.start(None if self._options.rows == "all" else self._touched.rows())
            self._touched.clear()

    def finish(self) -> None:
        """Waits for a sync that is under way, if there is one; all replicas come here in time."""
        if not self._average.under_way:
            return
        with record_function("fusedrec::sync"):
            late = self._options.overlap == "one_step"
            self._average.finish(self._touched.rows() if late else None)
            for table in self._cached():
                table.table.reset_cache_states()

    def _cached(self) -> list[TableRows]:
        return [table for table in self._tables if table.is_cached]

    @torch.no_grad()
    def begin_equal(self) -> None:
        """Gives all replicas the weights and the state of the first group's."""
        first = dist.get_global_rank(self._pg, 0)
        for table in self._tables:
            for block in table.blocks:
                for tensor in block.tensors:
                    dist.broadcast(tensor, first, group=self._pg)
