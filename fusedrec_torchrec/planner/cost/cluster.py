"""A cluster as the cost model sees it: links, memories and rates, from a file or measured.

Two kinds of links, within a node and between nodes.  A collective takes a latency for each kind of
link it uses, and the time of the slower kind to carry its bytes; an all-to-all also some time for
each rank at the other end.
"""

from pydantic import Field

from fusedrec_torchrec.access.replication import Line, Links
from fusedrec_torchrec.core.config import section
from fusedrec_torchrec.core.device import Device
from fusedrec_torchrec.sharding.sharding_type import FUSED_TYPES

__all__ = ["ClusterConfig", "LinkConfig", "RatesConfig"]

GB, MB = 1e9, 1e6
# How much faster ids of bags are read than made unique, rows added up than looked up one by one,
# and ids of bags gone through by owners than by requesters.
BAGS_FASTER = {
    "bag_ids": (4.0, "ids"),
    "bag_lookup": (10.0, "lookup"),
    "owner_ids": (1.0, "bag_ids"),
}


@section
class LinkConfig:
    """Describes the links of one kind, as collectives use them.

    Attributes:
        all_to_all: GB/s that a rank sends in an all-to-all.
        all_reduce: GB/s that a rank sends in an all-reduce.
        latency: Microseconds that a collective takes without data.
        peer: Microseconds of an all-to-all for each rank at the other end, however small its
            message.
    """

    all_to_all: float = Field(default=10.0, gt=0)
    all_reduce: float = Field(default=10.0, gt=0)
    latency: float = Field(default=20.0, ge=0)
    peer: float = Field(default=0.0, ge=0)


@section
class RatesConfig:
    """Says how fast a rank does the work of a sharding.

    Attributes:
        step: Microseconds of a step that do not depend on its size: Python, kernels that start.
        table: Microseconds for each table.
        ids: Million ids a second that a requester makes ready: dedup, or TorchRec's permutations.
        lookup: GB/s of rows that an owner looks up and updates.
        pooling: GB/s of rows that are pooled, and of their gradients.
        hot: Million ids a second that are looked up among the hot rows.
        bucket: Microseconds for each bucket of fused tables but the first.
        bag_ids: Million ids a second in bags that a requester tells apart and sends, of fused
            tables that their owners pool; bags themselves are made unique as ids are. Four
            times ids if none.
        bag_lookup: GB/s of rows that an owner pools, and updates, of the same tables, beyond the
            first of each bag, which counts as lookup. Ten times lookup if none.
        owner_ids: Million ids a second that an owner goes through for that, in lookup and update,
            however many columns it has. As bag_ids if none.
    """

    step: float = Field(default=500.0, ge=0)
    table: float = Field(default=0.0, ge=0)
    ids: float = Field(default=50.0, gt=0)
    lookup: float = Field(default=5.0, gt=0)
    pooling: float = Field(default=10.0, gt=0)
    hot: float = Field(default=100.0, gt=0)
    bucket: float = Field(default=0.0, ge=0)
    bag_ids: float | None = Field(default=None, gt=0)
    bag_lookup: float | None = Field(default=None, gt=0)
    owner_ids: float | None = Field(default=None, gt=0)

    def rate(self, kind: str) -> float:
        """Returns how much of a kind of work is done in a second, in the units of its field."""
        value: float | None = getattr(self, kind)
        if value is not None:
            return value
        times, other = BAGS_FASTER[kind]
        return times * self.rate(other)


@section
class ClusterConfig:
    """Describes a cluster: its ranks, memories, links and rates.

    Attributes:
        name: What people call it.
        device: Where tables live.
        ranks: Processes, one for each device.
        ranks_per_node: Of them, on one node.
        memory: GB of a rank for tables: of the device, or on CPU of the rank's share of the host.
        host_memory: GB of host memory for each device, for tables in unified memory.
        host_lookup: GB/s of rows that a device looks up and updates in host memory.
        hidden: Share of the sync of hot rows and of 2D replicas that runs beside other work.
        within_node: Links between ranks of one node.
        between_nodes: Links between nodes.
        fused: Rates of the fused shardings.
        stock: Of TorchRec's shardings, but for those that have rates of their own.
        table_wise: Rates of table_wise; those of stock if none.
        row_wise: Rates of row_wise; those of stock if none.
        column_wise: Rates of column_wise; those of stock if none.
    """

    name: str = "cluster"
    device: Device = "cuda"
    ranks: int = Field(default=8, ge=1)
    ranks_per_node: int = Field(default=8, ge=1)
    memory: float = Field(default=80.0, gt=0)
    host_memory: float = Field(default=128.0, ge=0)
    host_lookup: float = Field(default=10.0, gt=0)
    hidden: float = Field(default=0.0, ge=0, le=1)
    within_node: LinkConfig = LinkConfig()
    between_nodes: LinkConfig = LinkConfig()
    fused: RatesConfig = RatesConfig()
    stock: RatesConfig = RatesConfig()
    table_wise: RatesConfig | None = None
    row_wise: RatesConfig | None = None
    column_wise: RatesConfig | None = None

    def __post_init__(self) -> None:
        if self.ranks > self.ranks_per_node and self.ranks % self.ranks_per_node:
            raise ValueError(
                f"ranks is {self.ranks}, must be a multiple of ranks_per_node, "
                f"{self.ranks_per_node}, or less"
            )

    def rates(self, system: str) -> RatesConfig:
        """Returns the rates of a sharding."""
        if system in FUSED_TYPES:
            return self.fused
        return getattr(self, system, None) or self.stock

    @property
    def local_ranks(self) -> int:
        """How many of the ranks are on one node."""
        return min(self.ranks, self.ranks_per_node)

    def line(self, kind: str, ranks: int, local: int | None = None) -> Line:
        """Returns how long a collective takes for the bytes that a rank sends.

        Args:
            kind: ``all_reduce``; all others are as fast as an all-to-all.
            ranks: that take part.
            local: of them, on one node; as many as can be if None.
        """
        if kind == "all_reduce":
            size = ranks / max(2 * (ranks - 1), 1)
            base, more = (self.all_reduce(sent * size, ranks, local) for sent in (0.0, 1e6))
        else:
            base, more = (self.all_to_all(sent, ranks, local) for sent in (0.0, 1e6))
        return Line(base, (more - base) / 1e6)

    def links(self, ranks: int) -> Links:
        """Returns how fast so many ranks reach each other."""
        return Links(self.line("all_to_all", ranks), self.line("all_reduce", ranks), self.hidden)

    def all_to_all(self, sent: float, ranks: int | None = None, local: int | None = None) -> float:
        """Returns the seconds that an all-to-all takes.

        Args:
            sent: bytes that the busiest rank sends to (or gets from) other ranks, evenly.
            ranks: that take part, all if None.
            local: of them, on one node; as many as can be if None.
        """
        ranks = ranks or self.ranks
        if ranks < 2:
            return 0.0
        local = min(ranks, local or self.ranks_per_node)
        near = sent * (local - 1) / (ranks - 1)
        seconds = near / (self.within_node.all_to_all * GB)
        latency = self.within_node.latency if local > 1 else 0.0
        latency += self.within_node.peer * (local - 1)
        if ranks > local:
            far = sent - near
            seconds = max(seconds, far / (self.between_nodes.all_to_all * GB))
            latency += self.between_nodes.latency + self.between_nodes.peer * (ranks - local)
        return seconds + latency * 1e-6

    def all_reduce(self, size: float, ranks: int | None = None, local: int | None = None) -> float:
        """Returns the seconds that an all-reduce takes: within nodes, between them, and back.

        Args:
            size: bytes of the tensor.
            ranks: that take part, all if None.
            local: of them, on one node; as many as can be if None.
        """
        ranks = ranks or self.ranks
        if ranks < 2:
            return 0.0
        local = min(ranks, local or self.ranks_per_node)
        nodes = -(-ranks // local)
        seconds = 2 * (local - 1) / local * size / (self.within_node.all_reduce * GB)
        latency = self.within_node.latency if local > 1 else 0.0
        if nodes > 1:
            share = size / local  # each rank of a node has its share of the sum
            seconds += 2 * (nodes - 1) / nodes * share / (self.between_nodes.all_reduce * GB)
            latency += self.between_nodes.latency
        return seconds + latency * 1e-6
