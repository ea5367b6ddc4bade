"""The process group in which ids travel."""

import torch
import torch.distributed as dist

from fusedrec_torchrec.compat.id_group import id_group
from tests.cluster import Cluster

CPU = torch.device("cpu")


def group_of_ids() -> tuple[bool, bool, list[int], bool, bool]:
    """One rank's group for ids, and for those of its half of the ranks."""
    world = dist.group.WORLD
    assert world is not None
    dist.new_group([2, 3])  # ranks may have different numbers of groups
    own = id_group(world, CPU)
    halves = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    half = halves[dist.get_rank() // 2]
    of_half = id_group(half, CPU)
    found = torch.ones(1)
    dist.all_reduce(found, group=of_half)
    assert found.item() == 2
    timeouts = [each._get_backend(CPU).options._timeout for each in (half, of_half)]
    return (
        own is not world,
        own is id_group(world, CPU),
        dist.get_process_group_ranks(of_half),
        timeouts[0] == timeouts[1],
        id_group(world, torch.device("cuda")) is world,
    )


def test_it_has_the_same_ranks_and_is_made_once(cluster_4: Cluster) -> None:
    found = cluster_4.run(group_of_ids)
    assert found == [(True, True, ranks, True, True) for ranks in ([0, 1], [0, 1], [2, 3], [2, 3])]
