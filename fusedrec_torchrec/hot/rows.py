"""The hot rows of a module's fused tables: lookup, update, checkpoints, another hot set."""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import nn

from fusedrec_torchrec.compat.bucket_table import BucketKernel
from fusedrec_torchrec.compat.lookups import lookups_of
from fusedrec_torchrec.core.stages import stage
from fusedrec_torchrec.exchange.layout import ExchangeLayout
from fusedrec_torchrec.exchange.lookup import FusedLookup
from fusedrec_torchrec.exchange.replication import BatchReplicas, Replication
from fusedrec_torchrec.hot.adapt import Adaptation
from fusedrec_torchrec.hot.home import Home
from fusedrec_torchrec.hot.index import EMPTY, HotIndex
from fusedrec_torchrec.hot.options import HotOptions
from fusedrec_torchrec.hot.share import share
from fusedrec_torchrec.replicas.replica import Replica, check_replicable
from fusedrec_torchrec.replicas.sync import GradientSync

__all__ = ["HotRows", "Used", "hot_rows_of", "reconcile"]


@dataclass
class Used:
    """What batches have used so far, on this rank.

    Attributes:
        rows: rows, each once in a batch.
        hot: those of them that were hot.
    """

    rows: int = 0
    hot: int = 0

    def add(self, rows: int, hot: int) -> None:
        """Counts the rows of a batch."""
        self.rows += rows
        self.hot += hot

    def reset(self) -> None:
        """Begins to count anew."""
        self.rows = self.hot = 0


class HotRows(Replication):
    """Hot rows on this rank.

    Neither a module nor a parameter, so that nobody else synchronises or saves the replicas.

    Args:
        pg: the process group.
        id_pg: the same ranks, where ids travel.
        layout: with room for the hot rows.
        kernels: the buckets' tables on this rank.
        index: which rows are hot to begin with.
        options: the user's settings.
    """

    def __init__(
        self,
        pg: dist.ProcessGroup,
        id_pg: dist.ProcessGroup,
        layout: ExchangeLayout,
        kernels: Sequence[BucketKernel],
        index: HotIndex,
        options: HotOptions,
    ) -> None:
        assert layout.replica_capacity is not None
        for kernel, bucket in zip(kernels, layout.buckets, strict=True):
            table = layout.tables[bucket.first_table].name
            check_replicable(kernel, f"hot rows of table {table!r}")
        self._pg = pg
        self._layout = layout
        self._kernels = kernels
        self.options = options
        self._index = index
        self._replicas = [
            Replica.empty(kernel, capacity)
            for kernel, capacity in zip(kernels, layout.replica_capacity, strict=True)
        ]
        self._adaptation = (
            None if options.adapt is None else Adaptation(id_pg, layout, options.adapt)
        )
        self.used = Used()
        self._sync = GradientSync(pg, self._replicas, options.sync_every, codec=options.codec)
        self._current = index
        self._coming: deque[HotIndex] = deque()
        self._loads = 0
        self._homes = self._homes_of(index)
        for kernel in kernels:
            kernel.optimizer.register_state_hook(self.flush)

    name = "hot"

    @property
    def index(self) -> HotIndex:  # type: ignore[override]
        """The index that routes the next batch; it may have to be waited for."""
        if self._adaptation is not None:
            index = self._adaptation.next_index(self._index)
            if index is not None:
                self._index = index
                self._coming.append(index)
        return self._index

    @property
    def asks_first(self) -> bool:  # type: ignore[override]
        return self.options.hot_batches

    @property
    def bytes(self) -> int:
        """Memory of the replicas on this rank."""
        return sum(t.nbytes for replica in self._replicas for t in replica.tensors)

    # ------------------------------------------------------------ a batch

    def batch(self) -> "HotBatch":
        return HotBatch(self, self.index.version, self._loads)

    def enter(self, batch: "HotBatch") -> None:
        """Makes replicas and homes those that the batch was routed by.

        Collective where there is something to do, which all ranks know.
        """
        with torch.inference_mode(False):  # what is made here outlives an evaluation
            while self._current.version < batch.version:
                self._swap(self._coming.popleft())
            # A pipeline routes a batch before the one before it is looked up; what that one has
            # loaded need not be loaded again.
            if batch.stale and batch.loads == self._loads:
                self._reload()
        assert self._current.version == batch.version, "batches are looked up in order"

    def look_up_batch(self, batch: "HotBatch", out: torch.Tensor) -> None:
        """Writes the hot rows of a batch, bucket after bucket, into a flat buffer."""
        with stage("hot_rows"):
            self._sync.finish()
            sizes = [
                places.numel() * replica.dim
                for places, replica in zip(batch.places, self._replicas, strict=True)
            ]
            for replica, places, rows in zip(
                self._replicas, batch.places, out.split(sizes), strict=True
            ):
                replica.look_up(places, rows.view(-1, replica.dim))

    def send_gradients(self, batch: "HotBatch", flat: torch.Tensor) -> None:
        """Starts the sync of the gradients of a batch's hot rows."""
        if batch.version != self._current.version:
            raise RuntimeError(
                "the hot set changed between a batch's forward and its backward: with "
                "hot.adapt, a batch's backward must come before the next batch's forward"
            )
        with stage("hot_gradients"):
            sizes = [
                places.numel() * replica.dim
                for places, replica in zip(batch.places, self._replicas, strict=True)
            ]
            gradients = [
                rows.view(-1, replica.dim)
                for rows, replica in zip(flat.split(sizes), self._replicas, strict=True)
            ]
            self._sync.start(batch.places, gradients, batch.counts, batch.needs_owners)

    # ------------------------------------------------------------ checkpoints

    def is_stale(self) -> bool:
        return any(home.any_newer() for home in self._homes)

    def flush(self) -> None:
        """Brings the tables up to date, on this rank alone, without a word to the others."""
        self._sync.finish()
        self._write_homes()
        for home in self._homes:
            home.look_again()

    def purge(self) -> None:
        """Makes homes count: the tables are about to be overwritten, as far as they are loaded.

        What is not loaded must not go back, so homes are brought up to date first.  What
        ``sync_every`` has put off is dropped.
        """
        self.flush()
        for home in self._homes:
            home.all_newer()

    def reconcile(self) -> None:
        """Syncs what ``sync_every`` has put off; all ranks must come here together."""
        self._sync.reconcile()
        self._sync.finish()

    def _reload(self) -> None:
        """Fetches replicas from their homes, where these know better."""
        self.reconcile()
        self._write_homes()
        everything = [
            torch.arange(replica.capacity, device=self._layout.device) for replica in self._replicas
        ]
        share(self._pg, self._homes, self._replicas, everything)
        self._sync.reset()
        for home in self._homes:
            home.none_newer()
        self._loads += 1

    def _write_homes(self) -> None:
        for k, home in enumerate(self._homes):
            home.write(self._sync.reconciled(k))

    # ------------------------------------------------------------ what codecs have left

    def state(self) -> dict[str, torch.Tensor]:
        """Returns the codecs' state: thresholds, and by table what is left of gradients."""
        coded = self._sync.coded
        if coded is None:
            return {}
        self._sync.finish()
        state = coded.thresholds()
        for table, (k, ids, places) in self._places_of_tables().items():
            state |= {f"{table}.ids": ids, f"{table}.left": coded.left[k].index_select(0, places)}
        return state

    def load(self, states: Sequence[dict[str, torch.Tensor]], own: bool) -> None:
        """Takes over the state of this rank, or shares those of others."""
        coded = self._sync.coded
        if coded is None:
            return
        coded.load_thresholds(states)
        share = 1 if own else self._pg.size()
        for left in coded.left:
            left.zero_()
        for table, (k, ids, places) in self._places_of_tables().items():
            for state in states:
                if f"{table}.ids" not in state:
                    continue
                # States come from wherever they were loaded to; which rows are hot the host knows.
                before = state[f"{table}.ids"].to(ids.device)
                at = torch.searchsorted(before, ids).clamp(max=max(len(before) - 1, 0))
                known = (before[at] == ids).nonzero().flatten()
                left, all_left = coded.left[k], state[f"{table}.left"]
                rows = all_left.index_select(0, at[known].to(all_left.device)) / share
                left.index_add_(0, places[known.to(places.device)], rows.to(left.device))

    def _places_of_tables(self) -> dict[str, tuple[int, torch.Tensor, torch.Tensor]]:
        """Returns by table its bucket, the ids of hot rows in ascending order, and their places."""
        layout, places_of_tables = self._layout, {}
        keys = torch.cat(self._current.home_keys)
        ids_of = layout.rows_of(keys[keys != EMPTY])
        for k, bucket in enumerate(layout.buckets):
            sorted_keys, places = self._current.home_keys[k].sort()
            for t in range(bucket.first_table, bucket.end_table):
                ids = ids_of.get(layout.tables[t].name)
                if ids is not None:
                    at = torch.searchsorted(sorted_keys, layout.keys_of(t, ids))
                    places_of_tables[layout.tables[t].name] = k, ids, places[at].to(layout.device)
        return places_of_tables

    # ------------------------------------------------------------ another hot set

    def count(self, keys_U: torch.Tensor | None) -> None:
        """Takes a training batch's unique keys; None if this rank has no batch.

        If the hot set changes, batches are routed by the new one from the next batch on, and
        replicas and homes follow with that batch's lookup.
        """
        if self._adaptation is None:
            return
        if keys_U is None:
            self._adaptation.answer()
        else:
            self._adaptation.count(keys_U, self._index)

    def forget(self) -> None:
        if self._adaptation is not None:
            self._adaptation.forget()

    def _swap(self, index: HotIndex) -> None:
        """Sends rows home that are no longer hot, and takes those that are from here on."""
        self.reconcile()
        self._write_homes()
        newer = [
            [torch.zeros_like(tensor, dtype=torch.bool) for tensor in replica.tensors]
            for replica in self._replicas
        ]
        for home, of_places in zip(self._homes, newer, strict=True):
            for here, of_place in zip(home.newer, of_places, strict=True):
                of_place[home.places] = here
        new = [
            (before != after).nonzero().flatten().to(self._layout.device)
            for before, after in zip(self._current.home_keys, index.home_keys, strict=True)
        ]
        self._current, self._homes = index, self._homes_of(index)
        share(self._pg, self._homes, self._replicas, new)
        self._sync.reset()
        for home, of_places, places in zip(self._homes, newer, new, strict=True):
            home.none_newer()
            home.set_newer(
                [of_place.index_fill_(0, places, False)[home.places] for of_place in of_places]
            )

    # ------------------------------------------------------------ homes

    def _homes_of(self, index: HotIndex) -> list[Home]:
        layout, rank = self._layout, self._pg.rank()
        starts_P1 = layout.part_starts_P1.cpu().long()
        homes = []
        for k, (keys_H, kernel) in enumerate(zip(index.home_keys, self._kernels, strict=True)):
            begin, end = starts_P1[k * layout.owners + rank : k * layout.owners + rank + 2]
            places = ((keys_H >= begin) & (keys_H < end) & (keys_H != EMPTY)).nonzero().flatten()
            rows = keys_H[places] - begin
            homes.append(Home(kernel, places.to(layout.device), rows.to(layout.device)))
        return homes


@dataclass
class HotBatch(BatchReplicas):
    """The hot rows of one batch, from input dist to backward.

    Attributes:
        rows: the hot rows of the module.
        version: the hot set that the batch was routed by.
        loads: how often the replicas had been loaded from their homes when it was routed.
        places: of each bucket, the places of the replica that the batch uses, each once.
        counts: [rank][bucket] how many places each rank uses; all ranks know it.
        stale: whether some rank's replicas are older than their homes; all ranks know it.
        needs_owners: whether any rank's batch has rows that are not hot; all ranks know it.
    """

    rows: HotRows
    version: int
    loads: int
    places: list[torch.Tensor] = field(default_factory=list)
    counts: list[list[int]] = field(default_factory=list)
    stale: bool = False
    needs_owners: bool = True

    def record_stream(self, stream: torch.Stream) -> None:
        for places in self.places:
            places.record_stream(stream)

    def routed(
        self,
        places: list[torch.Tensor],
        counts: list[list[int]],
        stale: bool,
        rows: int,
        needs_owners: bool,
    ) -> None:
        self.places, self.counts, self.stale = places, counts, stale
        self.needs_owners = needs_owners
        self.rows.used.add(rows, sum(places_M.numel() for places_M in places))

    def routed_as(self, earlier: BatchReplicas) -> bool:
        return isinstance(earlier, HotBatch) and self.version == earlier.version

    def enter(self) -> None:
        self.rows.enter(self)

    def look_up(self, out: torch.Tensor) -> None:
        self.rows.look_up_batch(self, out)

    def send_gradients(self, flat: torch.Tensor) -> None:
        self.rows.send_gradients(self, flat)


def hot_rows_of(model: nn.Module) -> list[HotRows]:
    """Returns the hot rows of all modules of a sharded model."""
    lookups = [lookup for lookup in lookups_of(model) if isinstance(lookup, FusedLookup)]
    return [
        replication
        for lookup in lookups
        for replication in lookup.replication.members
        if isinstance(replication, HotRows)
    ]


def reconcile(model: nn.Module) -> None:
    """Syncs the replicas of all hot rows of a model, where ``sync_every`` has put it off.

    Must be called on all ranks, after a backward pass.  A state dict shows the rows as they were
    after the last sync: call this first where nothing of the steps since then may be missing.
    """
    for hot in hot_rows_of(model):
        hot.reconcile()
