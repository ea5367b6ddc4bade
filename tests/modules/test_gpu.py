"""CUDA and NCCL, and tables in host memory; skipped without a GPU."""

import dataclasses
from collections.abc import Iterator

import pytest
import torch

from tests.case import Case, Table
from tests.cluster import Cluster
from tests.parity import run_and_check

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
