"""Ranks as a grid: process groups of the two directions, and a group's plan on its own ranks."""

import copy
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torchrec.distributed.comm import get_local_size
from torchrec.distributed.types import EnumerableShardingSpec, ShardingPlan

from fusedrec_torchrec.compat.placement import RemoteDevice
from fusedrec_torchrec.sharding.grid_options import GridOptions

__all__ = ["Groups"]


@dataclass(frozen=True)
class Groups:
    """This rank's place in the grid.

    Attributes:
        mesh: [groups, ranks of a group], with dimensions "replicate" and "shard".
        sharding_pg: the ranks of this rank's group, over which tables are sharded.
        replica_pg: the ranks of all groups that have the same shards as this one.
    """

    mesh: DeviceMesh
    sharding_pg: dist.ProcessGroup
    replica_pg: dist.ProcessGroup

    @staticmethod
    def create(options: GridOptions, device: torch.device) -> "Groups":
        """Makes the process groups, or finds those of an earlier model; on all ranks.

        Groups are never given back, and each has threads and connections of its own.
        """
        world, key = dist.group.WORLD, (options.sharding_group_size, options.layout, device.type)
        if _made and _made[0][0] is not world:  # of a process group that is gone
            _made.clear()
        for _, made_for, groups in _made:
            if made_for == key:
                return groups
        groups = Groups._create(options, device)
        _made.append((world, key, groups))
        return groups

    @staticmethod
    def _create(options: GridOptions, device: torch.device) -> "Groups":
        ranks = dist.get_world_size()
        groups = options.groups(ranks)
        grid = torch.arange(ranks)
        matrix = (
            grid.view(-1, groups).t().contiguous()
            if options.layout == "replicas_adjacent"
            else grid.view(groups, -1)
        )
        mesh = DeviceMesh(device.type, matrix, mesh_dim_names=("replicate", "shard"))
        return Groups(mesh, mesh.get_group("shard"), mesh.get_group("replicate"))

    @property
    def ranks(self) -> list[int]:
        """The ranks of this rank's group."""
        return dist.get_process_group_ranks(self.sharding_pg)

    def place(self, plan: ShardingPlan) -> ShardingPlan:
        """Puts a plan for ranks 0, 1, ... of a group on the ranks of this rank's group.

        Raises:
            ValueError: the plan is for another number of ranks.
        """
        placed, ranks = copy.deepcopy(plan), self.ranks
        for module, of_module in placed.plan.items():
            for table, sharding in of_module.items():
                if sharding.sharding_type == "data_parallel":
                    continue
                where = f"plan of table {table!r} of module {module!r}"
                sharding.ranks = [_at(where, ranks, rank) for rank in sharding.ranks]
                if isinstance(sharding.sharding_spec, EnumerableShardingSpec):
                    for shard in sharding.sharding_spec.shards:
                        old = shard.placement
                        rank = _at(where, ranks, old.rank())
                        device = old.device()
                        index = "" if device.index is None else f":{rank % get_local_size()}"
                        shard.placement = RemoteDevice(f"rank:{rank}/{device.type}{index}")
        return placed


_made: list[tuple[object, tuple[int, str, str], Groups]] = []


def _at(where: str, ranks: list[int], rank: int) -> int:
    if rank >= len(ranks):
        raise ValueError(
            f"{where}: a shard lies on rank {rank}, must be on one of the {len(ranks)} ranks of a "
            "group (0, 1, ...): make the plan for a group, of sharding_group_size ranks"
        )
    return ranks[rank]
