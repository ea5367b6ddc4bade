"""What the emulated GPU shows: values, errors of launches, counts, more than one device."""

from typing import Any

import fbgemm_gpu  # noqa: F401
import pytest
import torch
import torch.distributed as dist

from tests.cluster import Cluster
from tests.emulated_cuda import LEAVE, counted, is_emulated, oracle

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not is_emulated(), reason="needs the emulated GPU (make test-cuda)"),
]


def compute() -> None:
    x = torch.arange(6.0, device="cuda").view(2, 3)
    product = x @ x.t()
    assert product.is_cuda and product.tolist() == [[5.0, 14.0], [14.0, 50.0]]
    weight = torch.ones(3, device="cuda", requires_grad=True)
    (x * weight).sum().backward()  # in a thread of autograd's
    assert weight.grad is not None and weight.grad.tolist() == [3.0, 5.0, 7.0]
    x[0] += 1  # in place, through a view
    assert x.tolist() == [[1.0, 2.0, 3.0], [3.0, 4.0, 5.0]]
    assert x[x > 3].tolist() == [4.0, 5.0]


def test_values_are_those_of_the_cpu(gpu_cluster: Cluster) -> None:
    gpu_cluster.run(compute)


def count() -> dict[str, Any]:
    ids, pinned = torch.arange(8, device="cuda"), torch.arange(8).pin_memory()
    with counted() as counts:
        ids.add_(1)
        pinned.to("cuda", non_blocking=True)
        torch.arange(8).to("cuda", non_blocking=True)
        dist.all_reduce(ids)
        total = int(ids.sum())
        torch.cuda.synchronize()
    ids.add_(1)  # is not counted
    assert total == 36 * dist.get_world_size()
    return {
        "kernels": counts.kernels,
        "syncs": counts.syncs,
        "pageable": counts.pageable_copies,
        "collectives": counts.collectives,
        "places": list(counts.sync_places),
    }


def test_what_is_asked_of_the_device_is_counted(gpu_cluster: Cluster) -> None:
    for counts in gpu_cluster.run(count):
        assert counts["kernels"] == 2 and counts["collectives"] == 1
        assert counts["syncs"] == 2 and counts["pageable"] >= 1
        assert counts["places"] == [
            "aten::_local_scalar_dense: elsewhere",
            "cuda.synchronize: elsewhere",
        ]


def launch_nothing() -> None:
    lengths, ids = torch.zeros(0).int().cuda(), torch.zeros(0).long().cuda()
    with pytest.raises(RuntimeError, match=r"grid|InvalidConfiguration"):
        torch.ops.fbgemm.block_bucketize_sparse_features(
            lengths, ids, False, False, torch.tensor([5]).cuda(), 2
        )


def test_a_kernel_of_no_blocks_is_refused_as_on_a_gpu(gpu_cluster: Cluster) -> None:
    gpu_cluster.run(launch_nothing)


def two_devices() -> None:
    here, there = torch.ones(2, device="cuda:0"), torch.ones(2, device="cuda:1")
    with pytest.raises(RuntimeError, match="same device"):
        here + there
    assert (here + there.to("cuda:0")).tolist() == [2.0, 2.0]


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_devices_do_not_mix(gpu_cluster: Cluster) -> None:
    gpu_cluster.run(two_devices)


def own_oracles() -> None:
    library = torch.library.Library("emulated_cuda", "FRAGMENT")
    library.define("halves(Tensor ids, Tensor(a!) seen) -> (Tensor, Tensor)")
    library.define("nothing(Tensor ids) -> Tensor")
    library.impl("halves", lambda ids, seen: (torch.empty_like(ids), ids.new_empty(1)), "CUDA")
    library.impl("nothing", lambda ids: ids.clone(), "CUDA")
    ids, seen = torch.tensor([4, 7]).cuda(), torch.zeros(2).long().cuda()
    with pytest.raises(NotImplementedError, match="emulated_cuda::halves has no CPU"):
        torch.ops.emulated_cuda.halves(ids, seen)

    @oracle("emulated_cuda::halves")
    def halves(ids: torch.Tensor, seen: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        seen += ids
        return ids // 2, ids.sum().view(1)

    @oracle("emulated_cuda::nothing")
    def nothing(ids: torch.Tensor) -> object:
        return LEAVE

    half, total = torch.ops.emulated_cuda.halves(ids, seen)
    assert half.is_cuda and half.tolist() == [2, 3] and total.tolist() == [11]
    assert seen.tolist() == [4, 7] and ids.tolist() == [4, 7]
    assert torch.ops.emulated_cuda.nothing(ids).tolist() == [4, 7]


def test_operators_of_ones_own_have_oracles_of_ones_own(gpu_cluster: Cluster) -> None:
    gpu_cluster.run(own_oracles)


def launch_triton() -> list[tuple[str, int]]:
    from tests.emulated_cuda.doubled import double

    library = torch.library.Library("emulated_triton", "FRAGMENT")
    library.define("double(Tensor(a!) x) -> ()")
    library.impl("double", double, "CUDA")

    @oracle("emulated_triton::double")
    def doubled(x: torch.Tensor) -> None:
        x *= 2

    x = torch.arange(300.0, device="cuda")
    with counted() as counts:
        torch.ops.emulated_triton.double(x)
    assert x[:3].tolist() == [0.0, 2.0, 4.0]
    return [(event.detail, event.size) for event in counts.of("kernel")]


def test_triton_compiles_and_its_launches_are_counted(gpu_cluster: Cluster) -> None:
    pytest.importorskip("triton")
    assert gpu_cluster.run(launch_triton) == [[("_double", 3)]] * gpu_cluster.world_size
