"""2D parallelism on CUDA; skipped without a GPU."""

import dataclasses
from typing import Any

import pytest
import torch

import fusedrec_torchrec as fr
from fusedrec_torchrec.core import gpu
from fusedrec_torchrec.grid.touched import ROWS_PER_USE
from tests.case import Case, Table, sharded
from tests.cluster import Cluster
from tests.grid.test_average import (
    LARGE,
    MIXED,
    TABLES,
    against_all_rows,
    bits,
    equal_replicas,
    one_step_late,
    overlapped,
)
from tests.grid.test_gradients import case_of as of_gradients
from tests.grid.test_gradients import train_and_compare
from tests.parity import train_step

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        torch.cuda.device_count() < 2, reason="needs two GPUs, or the emulated ones"
    ),
]


def case_of(tables: tuple[Table, ...], batch: int, **grid: Any) -> Case:
    options = {"sharding_group_size": 1, **grid}
    tables = tuple(dataclasses.replace(t, pooling="sum") for t in tables)
    return Case(
        tables=tables,
        batch_sizes=(batch, batch),
        optimizer="rowwise_adagrad",
        device="cuda",
        grid=fr.GridOptions(**options),
    )


# Rows are sorted where few of them are used, flagged where many are.
WAYS = [
    pytest.param(LARGE, 5, id="few rows"),
    pytest.param(LARGE, 90, id="many rows"),
    pytest.param(MIXED, 5, id="stock tables"),
    pytest.param(TABLES, 5, id="whole shards"),
]


@pytest.mark.parametrize("every", [1, 3])
@pytest.mark.parametrize(("tables", "batch"), WAYS)
def test_touched_rows_are_enough(
    gpu_cluster: Cluster, tables: tuple[Table, ...], batch: int, every: int
) -> None:
    """Bit for bit: two replicas, whose sum does not depend on an order."""
    case = case_of(tables, batch, sync_every=every)
    for found in gpu_cluster.run(against_all_rows, case):
        assert tables is not LARGE or (found["dense"] == 0 and found["sparse"] > 0)


@pytest.mark.parametrize(("tables", "batch"), WAYS)
def test_overlap_until_the_next_lookup(
    gpu_cluster: Cluster, tables: tuple[Table, ...], batch: int
) -> None:
    gpu_cluster.run(overlapped, case_of(tables, batch, overlap="until_lookup"))


@pytest.mark.parametrize(("tables", "batch"), [WAYS[0], WAYS[1], WAYS[3]])
def test_one_step_late(gpu_cluster: Cluster, tables: tuple[Table, ...], batch: int) -> None:
    case = case_of(tables, batch, overlap="one_step")
    case = dataclasses.replace(case, optimizer="sgd", learning_rate=2.0)
    gpu_cluster.run(one_step_late, case)


def with_and_without_kernels(case: Case) -> None:
    """Trains twice; the rows that travel and the values are the same."""
    done, values, used = [], [], 0
    available = gpu.available
    for has_kernels in (True, False):
        gpu.available = available if has_kernels else lambda: False
        try:
            model: Any = sharded(case)
            for step in range(case.steps):
                train_step(case, model, step)
                touched = model.replicas._touched
                used += touched._rows <= ROWS_PER_USE * touched._size
                model.sync()
            model.sync_now()
            equal_replicas(model)
        finally:
            gpu.available = available
        done.append(model.replicas.done)
        values.append(bits(model))
    assert used
    assert dataclasses.asdict(done[0]) == dataclasses.asdict(done[1])
    for got, want in zip(*values, strict=True):
        torch.testing.assert_close(got, want)


@pytest.mark.parametrize("every", [1, 2])
def test_kernels_average_what_torch_does(gpu_cluster: Cluster, every: int) -> None:
    gpu_cluster.run(with_and_without_kernels, case_of(LARGE, 90, sync_every=every))


def shared_gradients(**settings: Any) -> Case:
    """Replicas that share gradients: training as without groups."""
    case = of_gradients(1, 2, **settings)
    return dataclasses.replace(case, device="cuda")


@pytest.mark.parametrize("optimizer", ["sgd", "adagrad", "rowwise_adagrad"])
@pytest.mark.parametrize("integers", [True, False], ids=["exact", "random"])
def test_groups_that_share_gradients_train_as_the_unsharded_module(
    gpu_cluster: Cluster, optimizer: str, integers: bool
) -> None:
    """Outputs, weights and optimizer state after several steps."""
    gpu_cluster.run(train_and_compare, shared_gradients(optimizer=optimizer, integers=integers))


@pytest.mark.parametrize("kind", ["ec", "weighted", "vbe", "owners pool"])
def test_other_modules_of_groups_that_share_gradients(gpu_cluster: Cluster, kind: str) -> None:
    sums = tuple(dataclasses.replace(t, pooling="sum", dim=8) for t in TABLES)
    whole = tuple(dataclasses.replace(t, sharding="fused_table_wise") for t in TABLES)
    kinds: dict[str, dict[str, Any]] = {
        "ec": {"kind": "ec", "tables": sums},
        "weighted": {"weighted": True, "tables": sums},
        "vbe": {"vbe": True},
        "owners pool": {"tables": whole, "repeated": True},
    }
    case = shared_gradients(optimizer="rowwise_adagrad")
    gpu_cluster.run(train_and_compare, dataclasses.replace(case, **kinds[kind]))
