"""FBGEMM's table of a bucket: what streams share, and what it may be asked to do."""

import pytest
import torch

from fusedrec_torchrec.compat.bucket_table import BucketKernel
from fusedrec_torchrec.compat.lookups import lookups_of
from fusedrec_torchrec.compat.optimizers import OPTIMIZERS, optimizers_of
from fusedrec_torchrec.exchange.lookup import FusedLookup
from tests.case import Case, Table, sharded
from tests.cluster import Cluster
from tests.emulated_cuda import counted, is_emulated


def test_optimizers_that_only_have_a_name_are_not_offered() -> None:
    names = {device: {o.value for o in optimizers_of(device)} for device in ("cpu", "cuda")}
    assert names["cpu"] < names["cuda"] and "adam" in names["cuda"]
    assert names["cuda"] == {optimizer.value for optimizer in OPTIMIZERS} - {"lars_sgd"}


def kernel_of(case: Case) -> BucketKernel:
    (lookup,) = [x for x in lookups_of(sharded(case)) if isinstance(x, FusedLookup)]
    return lookup.kernels[0]


def grow_on_another_stream(case: Case) -> None:
    """The allocator must wait for streams that read the offsets before their memory goes on."""
    kernel = kernel_of(case)
    kernel.one_id_per_bag(10)
    reader, grower = torch.cuda.Stream(), torch.cuda.Stream()
    with torch.cuda.stream(reader):
        kernel.one_id_per_bag(5)
    with counted() as counts, torch.cuda.stream(grower):
        kernel.one_id_per_bag(1000)
    assert reader.cuda_stream in {event.stream for event in counts.of("event")}


@pytest.mark.gpu
@pytest.mark.skipif(not is_emulated(), reason="needs the emulated GPU (make test-cuda)")
def test_offsets_are_kept_for_streams_that_still_read_them(gpu_cluster: Cluster) -> None:
    case = Case(
        tables=(Table("a", 50),), batch_sizes=(1, 1)[: gpu_cluster.world_size], device="cuda"
    )
    gpu_cluster.run(grow_on_another_stream, case)
