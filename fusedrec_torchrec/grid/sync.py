"""When replicas are brought together, and which of their rows."""

import torch
import torch.distributed as dist
from torch import nn
from torch.profiler import record_function

from fusedrec_torchrec.compat.lookups import lookups_of
from fusedrec_torchrec.exchange.lookup import FusedLookup
from fusedrec_torchrec.grid.average import Average, Syncs
from fusedrec_torchrec.grid.gradients import SharedUpdates
from fusedrec_torchrec.grid.groups import Groups
from fusedrec_torchrec.grid.tables import TableRows, fbgemm_tables
from fusedrec_torchrec.grid.touched import TouchedRows
from fusedrec_torchrec.sharding.grid_options import GridOptions

__all__ = ["Replicas", "replicas_of"]


def replicas_of(model: nn.Module, groups: Groups, options: GridOptions) -> "Replicas":
    """Makes the sync that a user has chosen, for all tables of a model."""
    if options.sync == "gradients":
        return SharedGradients(model, groups)
    return AveragedWeights(model, groups, options)


@torch.no_grad()
def begin_equal(pg: dist.ProcessGroup, tables: list[TableRows]) -> None:
    """Gives all replicas the weights and the state of the first group's."""
    first = dist.get_global_rank(pg, 0)
    for table in tables:
        for block in table.blocks:
            for tensor in block.tensors:
                dist.broadcast(tensor, first, group=pg)


class Replicas:
    """This rank's shards and their replicas in other groups."""

    done = Syncs()
    """What syncs of weights have done so far."""

    def step(self) -> None:
        """Is called after a training step."""

    def sync_now(self) -> None:
        """Makes the replicas equal; on all ranks."""

    def begin(self) -> None:
        """Counts syncs from here: state was loaded."""

    def finish(self) -> None:
        """Waits for what is under way, if there is something; all replicas come here in time."""


class SharedGradients(Replicas):
    """Replicas that are equal at all times: updates are made with the gradients of all groups."""

    def __init__(self, model: nn.Module, groups: Groups) -> None:
        lookups = [lookup for lookup in lookups_of(model) if isinstance(lookup, FusedLookup)]
        self._updates = [
            replication
            for lookup in lookups
            for replication in lookup.replication.members
            if isinstance(replication, SharedUpdates)
        ]
        tables = [TableRows(table, 0, True) for table in fbgemm_tables(model)]
        begin_equal(groups.replica_pg, tables)

    def finish(self) -> None:
        for updates in self._updates:
            updates.finish()

    def sync_now(self) -> None:
        self.finish()


class AveragedWeights(Replicas):
    """Replicas that train alone and become their average every few steps.

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
                table.listen(lambda *_: self.finish())
        begin_equal(self._pg, self._tables)

    @property
    def done(self) -> Syncs:  # type: ignore[override]
        return self._average.done

    def step(self) -> None:
        self._steps += 1
        if self._steps % self._options.sync_every == 0:
            self._sync()
            if self._options.overlap == "none":
                self.finish()
        elif self._options.overlap == "one_step":
            self.finish()

    def sync_now(self) -> None:
        self._steps = 0
        self._sync()
        self.finish()

    def begin(self) -> None:
        # Rows that were touched stay so: a load of a part leaves others as different as they were.
        self._steps = 0

    def _sync(self) -> None:
        with record_function("fusedrec::sync"):
            self.finish()
            for table in self._cached():
                table.table.flush()
            self._average.start(None if self._options.rows == "all" else self._touched)
            self._touched.clear()

    def finish(self) -> None:
        if not self._average.under_way:
            return
        with record_function("fusedrec::sync"):
            late = self._options.overlap == "one_step"
            self._average.finish(self._touched.rows() if late else None)
            for table in self._cached():
                table.table.reset_cache_states()

    def _cached(self) -> list[TableRows]:
        return [table for table in self._tables if table.is_cached]
