"""What the counter counts, on collectives of known size."""

import torch
import torch.distributed as dist

from fusedrec_torchrec.core.collective_counter import Collective, CollectiveCounter
from tests.cluster import Cluster


def run_collectives() -> list[Collective]:
    rank, ranks = dist.get_rank(), dist.get_world_size()
    with CollectiveCounter() as counter:
        dist.all_reduce(torch.zeros(100))
        dist.broadcast(torch.zeros(100), src=0)
        dist.all_gather_into_tensor(torch.zeros(10 * ranks), torch.zeros(10))
        dist.reduce_scatter_tensor(torch.zeros(10), torch.zeros(10 * ranks))
        dist.all_to_all_single(torch.zeros(6 * ranks), torch.zeros(6 * ranks))
        send = [rank + 1 + i for i in range(ranks)]  # rank r sends r + 1 + i rows to rank i
        receive = [i + 1 + rank for i in range(ranks)]
        dist.all_to_all_single(
            torch.zeros(sum(receive), 3, dtype=torch.int64),
            torch.zeros(sum(send), 3, dtype=torch.int64),
            receive,
            send,
        )
        peer = rank ^ 1
        works = dist.batch_isend_irecv(
            [
                dist.P2POp(dist.isend, torch.zeros(7), peer),
                dist.P2POp(dist.irecv, torch.zeros(7), peer),
            ]
        )
        for work in works:
            work.wait()
    assert counter.bytes_sent() == sum(c.bytes_sent for c in counter.collectives)
    assert counter.bytes_sent("broadcast") == counter.collectives[1].bytes_sent
    return counter.collectives


def test_bytes_of_each_collective(cluster_4: Cluster) -> None:
    for rank, collectives in enumerate(cluster_4.run(run_collectives)):
        other_rows = sum(rank + 1 + i for i in range(4) if i != rank)
        assert [(c.name, c.bytes_sent) for c in collectives] == [
            ("all_reduce", 2 * 400 * 3 // 4),
            ("broadcast", 400 * 3 // 4),
            ("all_gather", 160 * 3 // 4),
            ("reduce_scatter", 160 * 3 // 4),
            ("all_to_all", 3 * 6 * 4),
            ("all_to_all", other_rows * 3 * 8),
            ("send", 7 * 4),
        ]
        assert collectives[-2].dtype == torch.int64
