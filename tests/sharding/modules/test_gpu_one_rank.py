"""One rank that asks nobody but itself, on CUDA; skipped without a GPU."""

import dataclasses
from collections.abc import Iterator

import pytest
import torch

import fusedrec_torchrec as fr
from tests.case import Case, Table
from tests.cluster import Cluster
from tests.hot.replicas import train_and_compare
from tests.parity import run_and_check
from tests.sharding.modules.test_codecs import CASES, train_within
from tests.sharding.modules.test_owner_pooling import MIX
from tests.sharding.modules.test_pipelines import compare

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA"),
]
TABLES = (Table("a", 50, dim=8, pooling="mean"), Table("b", 33, dim=16), Table("c", 20, dim=8))
SUMS = tuple(dataclasses.replace(t, pooling="sum", dim=8) for t in TABLES)
KINDS = {
    "bags": Case(TABLES, (7,)),
    "owners pool": Case(MIX, (7,), repeated=True),
    "weighted": Case(SUMS, (7,), weighted=True, integers=False),
    "variable batch": Case(TABLES, (7,), vbe=True),
    "sequences": Case(SUMS, (7,), kind="ec"),
    "exact counts": Case(TABLES, (7,), input_dist="exact_counts"),
    "one sample of one id": Case(TABLES, (1,), lengths=(1,)),
    "no samples": Case(TABLES, (0,)),
}


@pytest.fixture(scope="module")
def one_gpu() -> Iterator[Cluster]:
    cluster = Cluster(1, backend="nccl")
    yield cluster
    cluster.stop(kill=True)


@pytest.mark.parametrize("optimizer", ["sgd", "rowwise_adagrad"])
@pytest.mark.parametrize("name", KINDS)
def test_training_equals_unsharded(one_gpu: Cluster, name: str, optimizer: str) -> None:
    case = dataclasses.replace(KINDS[name], device="cuda", optimizer=optimizer)
    one_gpu.run(run_and_check, case)


@pytest.mark.parametrize("options", [fr.HotOptions(), fr.HotOptions(hot_batches=True)])
def test_hot_rows(one_gpu: Cluster, options: fr.HotOptions) -> None:
    tables = tuple(dataclasses.replace(t, hot=(0, 1, 2)) for t in TABLES)
    one_gpu.run(train_and_compare, Case(tables, (7,), device="cuda", hot_options=options))


def test_codecs(one_gpu: Cluster) -> None:
    case = dataclasses.replace(CASES["ebc"], device="cuda", batch_sizes=(6,))
    one_gpu.run(train_within, case, "int8", "bf16")


def test_a_pipeline(one_gpu: Cluster) -> None:
    case = Case(TABLES, (6,), optimizer="rowwise_adagrad", integers=False, device="cuda")
    one_gpu.run(compare, case, "TrainPipelineSparseDist")
