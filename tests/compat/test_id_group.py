"""The process group in which ids travel."""

import gc

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d
from torchrec.distributed.sharding.dp_sharding import DpPooledEmbeddingSharding
from torchrec.distributed.sharding.tw_sharding import TwPooledEmbeddingSharding

from fusedrec_torchrec.compat.id_group import id_group, ids_apart
from fusedrec_torchrec.compat.stores import PrefixStore, TCPStore
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


def groups_on_one_store() -> tuple[list[float], list[str]]:
    """The default group is made several times on one store, each time with a group for ids."""
    rank, world = dist.get_rank(), dist.get_world_size()
    sums: list[float] = []
    names: list[str] = []
    port = [0]
    if rank == 0:
        store = TCPStore("127.0.0.1", 0, world, is_master=True, wait_for_workers=False)
        port = [store.port]
    dist.broadcast_object_list(port, 0)
    if rank:
        store = TCPStore("127.0.0.1", port[0], world, is_master=False, wait_for_workers=False)
    dist.destroy_process_group()
    for number in range(3):
        # The default group has a name that torch gives, and must not find earlier addresses.
        own = PrefixStore(str(number), store)
        dist.init_process_group("gloo", store=own, rank=rank, world_size=world)
        assert dist.group.WORLD is not None
        value = torch.ones(1)
        group = id_group(dist.group.WORLD, CPU)
        dist.all_reduce(value, group=group)
        sums.append(value.item())
        names.append(str(group.group_name))
        dist.barrier()
        dist.destroy_process_group()
    return sums, names


def test_a_store_can_be_used_again() -> None:
    cluster = Cluster(2)
    try:
        (sums, names), other = cluster.run(groups_on_one_store)
        assert sums == [2.0] * 3
        assert other == (sums, names)
        assert len(set(names)) == 3  # the store still has the addresses of earlier groups
    finally:
        cluster.stop(kill=True)


def groups_that_end() -> tuple[int, int]:
    """Groups of this rank before and after groups with groups for ids were made and ended."""
    world = distributed_c10d._world
    before = len(world.pg_map)
    for _ in range(3):
        group = dist.new_group([0, 1])
        id_group(group, CPU)
        assert len(world.pg_map) == before + 2
        dist.destroy_process_group(group)
        del group
        gc.collect()
    return before, len(world.pg_map)


def test_it_ends_with_the_group_that_it_goes_with(cluster_2: Cluster) -> None:
    for before, after in cluster_2.run(groups_that_end):
        assert before == after


def test_it_has_the_same_ranks_and_is_made_once(cluster_4: Cluster) -> None:
    found = cluster_4.run(group_of_ids)
    assert found == [(True, True, ranks, True, True) for ranks in ([0, 1], [0, 1], [2, 3], [2, 3])]


def stock_shardings_in_and_after() -> tuple[bool, bool]:
    """Whether a stock sharding has the group for ids while its input dist is made, and after."""
    world = dist.group.WORLD
    assert world is not None
    sharding = TwPooledEmbeddingSharding.__new__(TwPooledEmbeddingSharding)
    sharding._pg = world
    with ids_apart([sharding], CPU):
        inside = sharding._pg is id_group(world, CPU)
    return inside, sharding._pg is world


def test_stock_shardings_make_input_dists_in_it(cluster_2: Cluster) -> None:
    assert cluster_2.run(stock_shardings_in_and_after) == [(True, True)] * 2


def test_shardings_that_send_ids_must_have_a_group() -> None:
    """Data-parallel ones send none and need none."""
    with ids_apart([DpPooledEmbeddingSharding.__new__(DpPooledEmbeddingSharding)], CPU):
        pass
    without = TwPooledEmbeddingSharding.__new__(TwPooledEmbeddingSharding)
    with (
        pytest.raises(AssertionError, match="TwPooledEmbeddingSharding has no process group"),
        ids_apart([without], CPU),
    ):
        raise RuntimeError("comes too late")
