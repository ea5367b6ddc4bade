"""A cluster as the cost model sees it: links, memories and rates, from a file or measured.

Two kinds of links, within a node and between nodes.  A collective takes a latency for each kind of
link it uses, and the time of the slower kind to carry its bytes; an all-to-all also some time for
each rank at the other end.
"""

from typing import Any, Literal

from pydantic import Field
from torchrec.distributed.planner.types import Topology

from fusedrec_torchrec.core.config import section
from fusedrec_torchrec.sharding.sharding_type import FUSED

__all__ = ["ClusterConfig", "LinkConfig", "RatesConfig"]

GB, MB = 1e9, 1e6


@section
class LinkConfig:
    all_to_all: float = Field(default=10.0, gt=0)
    """GB/s that a rank sends in an all-to-all."""
    all_reduce: float = Field(default=10.0, gt=0)
    """GB/s that a rank sends in an all-reduce."""
    latency: float = Field(default=20.0, ge=0)
    """Microseconds that a collective takes without data."""
    peer: float = Field(default=0.0, ge=0)
    """Microseconds of an all-to-all for each rank at the other end, however small its message."""


@section
class RatesConfig:
    step: float = Field(default=500.0, ge=0)
    """Microseconds of a step that do not depend on its size: Python, kernels that start."""
    table: float = Field(default=0.0, ge=0)
    """Microseconds for each table."""
    ids: float = Field(default=50.0, gt=0)
    """Million ids a second that a requester makes ready: dedup, or TorchRec's permutations."""
    lookup: float = Field(default=5.0, gt=0)
    """GB/s of rows that an owner looks up and updates."""
    pooling: float = Field(default=10.0, gt=0)
    """GB/s of rows that are pooled, and of their gradients."""
    hot: float = Field(default=100.0, gt=0)
    """Million ids a second that are looked up among the hot rows."""


@section
class ClusterConfig:
    name: str = "cluster"
    """What people call it."""
    device: Literal["cuda", "cpu"] = "cuda"
    """Where tables live."""
    ranks: int = Field(default=8, ge=1)
    """Processes, one for each device."""
    ranks_per_node: int = Field(default=8, ge=1)
    """Of them, on one node."""
    memory: float = Field(default=80.0, gt=0)
    """GB of a rank for tables: of the device, or on CPU of the rank's share of the host."""
    host_memory: float = Field(default=128.0, ge=0)
    """GB of host memory for each device, for tables in unified memory."""
    host_lookup: float = Field(default=10.0, gt=0)
    """GB/s of rows that a device looks up and updates in host memory."""
    hidden: float = Field(default=0.0, ge=0, le=1)
    """Share of the sync of hot rows and of 2D replicas that runs beside other work."""
    within_node: LinkConfig = LinkConfig()
    between_nodes: LinkConfig = LinkConfig()
    fused: RatesConfig = RatesConfig()
    stock: RatesConfig = RatesConfig()
    """Of TorchRec's shardings, but for those that have rates of their own."""
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
        if system == FUSED:
            return self.fused
        return getattr(self, system, None) or self.stock

    @property
    def local_ranks(self) -> int:
        """How many ranks are on one node."""
        return min(self.ranks, self.ranks_per_node)

    def topology(self, **settings: Any) -> Topology:
        """Returns the same cluster for TorchRec's estimators and partitioners."""
        on_cuda = self.device == "cuda"
        return Topology(
            world_size=self.ranks,
            local_world_size=self.local_ranks,
            compute_device=self.device,
            hbm_cap=int(self.memory * GB) if on_cuda else 0,
            ddr_cap=int((self.host_memory if on_cuda else self.memory) * GB),
            intra_host_bw=self.within_node.all_to_all * GB / 1e3,  # TorchRec counts milliseconds
            inter_host_bw=self.between_nodes.all_to_all * GB / 1e3,
            **settings,
        )

    def all_to_all(self, sent: float, ranks: int | None = None, local: int | None = None) -> float:
        """Returns the seconds of an all-to-all.

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
        """Returns the seconds of an all-reduce within nodes, between them, and within them again.

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
            part = size / local  # each rank of a node has its part of the sum
            seconds += 2 * (nodes - 1) / nodes * part / (self.between_nodes.all_reduce * GB)
            latency += self.between_nodes.latency
        return seconds + latency * 1e-6
