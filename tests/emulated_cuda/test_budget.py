"""A training step asks no more of the device than it did.

What is counted is one step, forward, backward and update, of one rank of two, on a batch that is on
the device already.  When a step asks for less than its budget, lower the budget.
"""

from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist

from tests.case import Case, Table, batch, local_device, sharded
from tests.cluster import Cluster
from tests.emulated_cuda import counted, is_emulated

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not is_emulated(), reason="needs the emulated GPU (make test-cuda)"),
]

TABLES = 26
WARM_UP_STEPS = 4


class Budget(NamedTuple):
    """The most of each that a step may take."""

    kernels: int
    syncs: int
    pageable_copies: int
    collectives: int


WORKLOADS: dict[str, tuple[tuple[int, ...], tuple[int, ...]]] = {
    "one dimension, one id per bag": ((16,), (1,)),
    "four dimensions, 0 to 4 ids": ((16, 32, 64, 128), (0, 1, 2, 3, 4)),
}
BUDGETS = {
    ("one dimension, one id per bag", "fused_row_wise"): Budget(39, 2, 1, 3),
    ("one dimension, one id per bag", "table_wise"): Budget(52, 8, 8, 5),
    ("four dimensions, 0 to 4 ids", "fused_row_wise"): Budget(122, 2, 1, 3),
    ("four dimensions, 0 to 4 ids", "table_wise"): Budget(55, 8, 8, 5),
}


def case_of(workload: str, sharding: str, **settings: Any) -> Case:
    dims, lengths = WORKLOADS[workload]
    tables = tuple(
        Table(f"t{i}", 1000, dim=dims[i % len(dims)], sharding=sharding) for i in range(TABLES)
    )
    return Case(
        tables=tables,
        batch_sizes=(64, 64),
        lengths=lengths,
        optimizer="rowwise_adagrad",
        device="cuda",
        **settings,
    )


def count_step(case: Case) -> tuple[Budget, dict[str, int]]:
    """Counts a step of this rank; also where it waits for the device."""
    model = sharded(case)
    module: Any = model._dmp_wrapped_module
    while not hasattr(module, "sparse"):
        module = module.module
    gradient = None
    for step in range(WARM_UP_STEPS):
        features = batch(case, step, dist.get_rank()).to(local_device(case))
        with counted() as counts:
            pooled = module.sparse(features).values()
            if gradient is None:
                gradient = torch.ones_like(pooled)
            pooled.backward(gradient)
    numbers = Budget(counts.kernels, counts.syncs, counts.pageable_copies, counts.collectives)
    return numbers, dict(counts.sync_places)


def test_a_step_stays_within_its_budget(
    gpu_cluster: Cluster, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = ["", "| 26 tables | sharding | kernels | syncs | pageable copies | collectives |"]
    lines.append("|---|---|---|---|---|---|")
    over = []
    for (workload, sharding), budget in BUDGETS.items():
        (used, places), *_ = gpu_cluster.run(count_step, case_of(workload, sharding))
        lines.append(f"| {workload} | {sharding} | " + " | ".join(map(str, used)) + " |")
        for name, number, most in zip(Budget._fields, used, budget, strict=True):
            if number > most:
                over.append(f"{sharding}, {workload}: {name} {number}, at most {most}; {places}")
    with capsys.disabled():
        print("\n".join(lines))
    assert not over, "\n".join(over)
