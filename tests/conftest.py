"""Clusters of real gloo processes, one of each size per test session."""

import os
from collections.abc import Callable, Iterator
from importlib.metadata import PackageNotFoundError, version
from multiprocessing.forkserver import ensure_running

import pytest
import torch
from hypothesis import HealthCheck, settings

from tests.cluster import Cluster


def _is_installed(package: str) -> bool:
    try:
        return bool(version(package))
    except PackageNotFoundError:
        return False


# The CPU stack is tested on CPU, also on a machine with GPUs and if its torch is a CUDA build:
# FBGEMM has no kernels for them there.  Nobody has asked for GPUs yet.
if _is_installed("fbgemm-gpu-cpu"):
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
# Kernels are made for Triton's interpreter, or for the GPU, when they are imported.
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

settings.register_profile(
    "default",
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
settings.load_profile("default")


@pytest.fixture(scope="session", autouse=True)
def _fork_server() -> None:
    """Started before a test can: whoever starts it says what it imports."""
    ensure_running()


@pytest.fixture(scope="session")
def clusters() -> Iterator[Callable[[int], Cluster]]:
    started: dict[int, Cluster] = {}

    def get(world_size: int) -> Cluster:
        if world_size not in started:
            started[world_size] = Cluster(world_size)
        return started[world_size]

    yield get
    for cluster in started.values():
        cluster.stop(kill=True)  # nothing of them is needed any more


@pytest.fixture(scope="session")
def cluster_1(clusters: Callable[[int], Cluster]) -> Cluster:
    return clusters(1)


@pytest.fixture(scope="session")
def cluster_2(clusters: Callable[[int], Cluster]) -> Cluster:
    return clusters(2)


@pytest.fixture(scope="session")
def cluster_4(clusters: Callable[[int], Cluster]) -> Cluster:
    return clusters(4)


@pytest.fixture(scope="session")
def gpu_cluster() -> Iterator[Cluster]:
    """Up to two ranks on GPUs of their own, real or emulated ones; for tests marked ``gpu``."""
    cluster = Cluster(min(2, torch.cuda.device_count()), backend="nccl")
    yield cluster
    cluster.stop()  # what watches them, such as a sanitizer, has its say at their end
