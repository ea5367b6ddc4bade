"""A cluster as TorchRec's estimators and partitioners see it."""

from typing import Any

from torchrec.distributed.planner.types import Topology

from fusedrec_torchrec.planner.cost.cluster import GB, ClusterConfig

__all__ = ["topology_of"]


def topology_of(cluster: ClusterConfig, **settings: Any) -> Topology:
    """Returns TorchRec's topology of a cluster; ``settings`` are further arguments of it."""
    on_cuda = cluster.device == "cuda"
    return Topology(
        world_size=cluster.ranks,
        local_world_size=cluster.local_ranks,
        compute_device=cluster.device,
        hbm_cap=int(cluster.memory * GB) if on_cuda else 0,
        ddr_cap=int((cluster.host_memory if on_cuda else cluster.memory) * GB),
        intra_host_bw=cluster.within_node.all_to_all * GB / 1e3,  # TorchRec counts milliseconds
        inter_host_bw=cluster.between_nodes.all_to_all * GB / 1e3,
        **settings,
    )
