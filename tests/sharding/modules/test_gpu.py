"""CUDA and NCCL, and tables in host memory; skipped without a GPU."""

import dataclasses
from collections.abc import Iterator

import pytest
import torch

import fusedrec_torchrec as fr
from tests.case import Case, Table, sharded
from tests.cluster import Cluster
from tests.hot.replicas import train_and_compare
from tests.parity import run_and_check, train_step
from tests.sharding.modules.test_bad_input import Spoil, missing_feature, spoil_and_go_on, too_large
from tests.sharding.modules.test_pipelines import compare

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA"),
]

TABLES = (Table("a", 500, dim=8, pooling="mean"), Table("b", 330, dim=16), Table("c", 70, dim=8))


@pytest.fixture(scope="module")
def gpu_cluster() -> Iterator[Cluster]:
    cluster = Cluster(min(2, torch.cuda.device_count()), backend="nccl")
    yield cluster
    cluster.stop()


@pytest.mark.parametrize("kernel", ["fused", "fused_uvm", "fused_uvm_caching"])
@pytest.mark.parametrize("optimizer", ["sgd", "adagrad", "rowwise_adagrad"])
@pytest.mark.parametrize("kind", ["ebc", "ec"])
def test_training_equals_unsharded(
    gpu_cluster: Cluster, kernel: str, optimizer: str, kind: str
) -> None:
    case = Case(
        tables=tuple(
            dataclasses.replace(t, kernel=kernel, dim=8 if kind == "ec" else t.dim) for t in TABLES
        ),
        batch_sizes=(7, 5)[: gpu_cluster.world_size],
        kind=kind,
        optimizer=optimizer,
        integers=False,
        device="cuda",
    )
    gpu_cluster.run(run_and_check, case)


def test_tables_in_device_and_in_host_memory_in_one_module(gpu_cluster: Cluster) -> None:
    kernels = ("fused", "fused_uvm", "fused_uvm_caching")
    case = Case(
        tables=tuple(
            dataclasses.replace(t, kernel=kernel) for t, kernel in zip(TABLES, kernels, strict=True)
        ),
        batch_sizes=(7, 5)[: gpu_cluster.world_size],
        device="cuda",
    )
    gpu_cluster.run(run_and_check, case)


@pytest.mark.parametrize("vbe", [False, True])
@pytest.mark.parametrize("weighted", [False, True])
def test_weighted_and_variable_batches(gpu_cluster: Cluster, vbe: bool, weighted: bool) -> None:
    case = Case(
        tables=tuple(Table(t.name, t.rows, t.dim) for t in TABLES),
        batch_sizes=(7, 5)[: gpu_cluster.world_size],
        vbe=vbe,
        weighted=weighted,
        integers=False,
        device="cuda",
    )
    gpu_cluster.run(run_and_check, case)


def trains_as_stock(case: Case) -> None:
    """Optimizers that only CUDA has, against TorchRec's row-wise sharding."""
    ours, stock = sharded(case), sharded(case.only("row_wise"))
    for step in range(case.steps):
        got, want = train_step(case, ours, step), train_step(case, stock, step)
        for name in want:
            torch.testing.assert_close(got[name], want[name], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("optimizer", ["adam", "partial_rowwise_adam", "lamb", "lars_sgd"])
def test_optimizers_of_cuda_only(gpu_cluster: Cluster, optimizer: str) -> None:
    case = Case(
        tables=tuple(Table(t.name, t.rows, t.dim) for t in TABLES),
        batch_sizes=(6, 6)[: gpu_cluster.world_size],
        optimizer=optimizer,
        integers=False,
        device="cuda",
    )
    gpu_cluster.run(trains_as_stock, case)


@pytest.mark.parametrize(
    "name",
    ["TrainPipelineSparseDist", "TrainPipelineFusedSparseDist", "TrainPipelineSparseDistLite"],
)
def test_pipelines_with_streams(gpu_cluster: Cluster, name: str) -> None:
    case = Case(
        tables=TABLES,
        batch_sizes=(6, 6)[: gpu_cluster.world_size],
        optimizer="rowwise_adagrad",
        integers=False,
        device="cuda",
    )
    gpu_cluster.run(compare, case, name)


@pytest.mark.parametrize("spoil", [too_large, missing_feature])
def test_bad_batch(gpu_cluster: Cluster, spoil: Spoil) -> None:
    last = gpu_cluster.world_size - 1
    case = Case(
        tables=(Table("a", 50, dim=8), Table("b", 30, dim=16)),
        batch_sizes=(6, 6)[: last + 1],
        lengths=(1, 2),
        device="cuda",
    )
    texts = gpu_cluster.run(spoil_and_go_on, case, spoil, bad_ranks=(last,), first=1)
    assert len(set(texts)) == 1
    assert texts[0].startswith(f"bad input on rank {last}: feature 'f_b'")


@pytest.mark.parametrize("kernel", ["fused", "fused_uvm_caching"])
@pytest.mark.parametrize("optimizer", ["sgd", "adagrad", "rowwise_adagrad"])
@pytest.mark.parametrize("kind", ["ebc", "ec"])
def test_hot_rows_in_device_memory(
    gpu_cluster: Cluster, kernel: str, optimizer: str, kind: str
) -> None:
    case = Case(
        tables=tuple(
            dataclasses.replace(
                t, kernel=kernel, dim=8 if kind == "ec" else t.dim, hot=tuple(range(0, t.rows, 7))
            )
            for t in TABLES
        ),
        batch_sizes=(7, 5)[: gpu_cluster.world_size],
        kind=kind,
        optimizer=optimizer,
        device="cuda",
        hot_options=fr.HotOptions(adapt=fr.AdaptOptions(every=2, sample=1)),
    )
    gpu_cluster.run(train_and_compare, case)
