"""The same error on all ranks, also in a group of some of them."""

import torch
import torch.distributed as dist

from fusedrec_torchrec.core.all_ranks import MESSAGE_BYTES, raise_bad_input
from tests.cluster import Cluster


def raise_in_group(text: str) -> str | None:
    group = dist.new_group([2, 3])
    rank = dist.get_rank()
    if rank < 2:
        return None
    try:
        raise_bad_input(group, [1], text if rank == 3 else None, torch.device("cpu"))
    except ValueError as error:
        return str(error)
    raise AssertionError("no error")


def test_ranks_are_those_of_the_group(cluster_4: Cluster) -> None:
    want = "bad input on rank 1: öh"
    assert cluster_4.run(raise_in_group, "öh") == [None, None, want, want]


def test_long_messages_are_cut(cluster_4: Cluster) -> None:
    want = "bad input on rank 1: " + "x" * MESSAGE_BYTES
    assert cluster_4.run(raise_in_group, "x" * 5000)[2:] == [want, want]
