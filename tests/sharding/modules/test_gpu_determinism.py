"""The same sums in every run, where torch is asked for them; on CUDA, skipped without a GPU."""

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

import fusedrec_torchrec as fr
from fusedrec_torchrec.core import gpu
from tests.case import Case, Table, sharded
from tests.cluster import Cluster
from tests.parity import local_parts, optimizer_states, run_and_check, train_step
from tests.sharding.modules.test_codecs import codecs, options
from tests.sharding.modules.test_owner_pooling import MIX, SUMS

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA"),
]
ROWS = (Table("a", 50, dim=8, pooling="mean"), Table("b", 33, dim=16), Table("c", 20, dim=8))
CASES = {
    "bags": Case(MIX, (5, 4), repeated=True),
    "weighted": Case(SUMS, (5, 4), weighted=True, repeated=True),
    "variable batches": Case(MIX, (5, 4), vbe=True),
    "sequences": Case((Table("a", 50), Table("b", 33)), (5, 4), kind="ec"),
    "hot rows": Case((dataclasses.replace(ROWS[0], hot=(0, 1, 7)), *ROWS[1:]), (5, 4)),
    "stock": Case((*ROWS[:2], Table("d", 40, sharding="table_wise")), (5, 5)),
}
CODECS = {
    "none": fr.Codecs(),
    "int8": codecs("int8", "int8"),
    "dct": fr.Codecs(forward=fr.CodecOptions(type="dct", density=0.3)),
}


@contextmanager
def the_same_sums() -> Iterator[None]:
    """Strictly: torch raises where it has no way to do that."""
    torch.use_deterministic_algorithms(True)
    try:
        assert not gpu.available()
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def is_right(case: Case) -> None:
    with the_same_sums():
        run_and_check(case)


@pytest.mark.parametrize("name", CASES)
def test_training_equals_unsharded(gpu_cluster: Cluster, name: str) -> None:
    gpu_cluster.run(is_right, on_gpus(gpu_cluster, CASES[name]))


def on_gpus(cluster: Cluster, case: Case) -> Case:
    sizes = case.batch_sizes[: cluster.world_size]
    return dataclasses.replace(case, device="cuda", batch_sizes=sizes)


def train(case: Case, given: fr.Codecs) -> list[torch.Tensor]:
    """Returns outputs, weights and optimizer state of this rank."""
    model = sharded(case, options(case, given))
    outputs = [train_step(case, model, step) for step in range(case.steps)]
    states = [*model.state_dict().values(), *optimizer_states(model).values()]
    found = [output for of_step in outputs for _, output in sorted(of_step.items())]
    return found + [part.clone() for value in states for _, part in local_parts(value)]


def two_runs(case: Case, given: fr.Codecs) -> None:
    with the_same_sums():
        for one, other in zip(train(case, given), train(case, given), strict=True):
            assert torch.equal(one, other)


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("name", ["bags", "sequences", "hot rows"])
def test_two_runs_have_the_same_bits(gpu_cluster: Cluster, name: str, codec: str) -> None:
    case = dataclasses.replace(
        CASES[name], integers=False, optimizer="rowwise_adagrad", lengths=(0, 1, 90)
    )
    gpu_cluster.run(two_runs, on_gpus(gpu_cluster, case), CODECS[codec])
