"""Bytes of kernels and the least time of a step, counted from shapes."""

import sys
from pathlib import Path

import pytest

from fusedrec_torchrec.core.gpu.traffic import Shape, kernels
from fusedrec_torchrec.planner.cost.roofline import (
    GPUS,
    LAUNCHES,
    fbgemm_backward,
    fbgemm_forward,
    roofline,
)

ROOT = Path(__file__).parents[3]
sys.path.insert(0, str(ROOT / "benchmarks"))
from roofline import (  # type: ignore[import-not-found, no-redef, unused-ignore]  # noqa: E402
    REFERENCE,
    WORKLOADS,
    cluster_of,
    rates_of,
    ratios,
    stages,
    tables_of,
    traffic,
)  # fmt: skip

# Bytes of all kernels in units of the least: as asked, and every element once.  Wanted: 1.3.
MOST = {"one id per bag": (2.00, 1.39), "bags of 10 ids": (3.92, 1.97)}


def test_kernels_read_and_write_no_more_than_they_did() -> None:
    assert MOST.keys() == WORKLOADS.keys()
    for workload, (most_asked, most_once) in MOST.items():
        asked, once, least = ratios(workload)
        assert least == 1 <= once <= asked
        assert asked <= most_asked and once <= most_once


def test_no_kernel_needs_less_than_the_least() -> None:
    for kernel in kernels(Shape(ids=1000, unique=400, bags=300, asked=400, dim=16)):
        assert kernel.asked >= kernel.once >= kernel.least >= 0, kernel


def test_bytes_by_hand() -> None:
    shape = Shape(ids=6, unique=4, bags=3, asked=5, dim=8)
    counted = {kernel.kernel: kernel for kernel in kernels(shape)}
    assert shape.places == 64
    assert counted["slot_bag_sums"].asked == 6 * 4 + 6 * 32 + 3 * 8 + 3 * 32
    assert counted["slot_bag_sums"].least == 6 * 4 + 4 * 32 + 3 * 4 + 3 * 32
    assert counted["slot_row_sums"].asked == 6 * 4 + 2 * 6 * 32 + 3 * 8 + 3 * 32
    assert counted["unpack"].asked == 5 * 8
    assert fbgemm_forward(6, 3, 8) == 6 * (8 + 32) + 3 * (8 + 32)
    # Two passes for 2^16 rows.
    sort = 6 * 24 + 2 * 12 * 2 * 6 + 6 * 8 + 4 * 12
    assert fbgemm_backward(6, 4, 3, 8, 1 << 16) == sort + 6 * 32 + 2 * 4 * 36


@pytest.mark.parametrize("gpu", GPUS)
def test_rates_of_clusters_are_those_that_are_estimated(gpu: str) -> None:
    cluster = cluster_of(gpu)
    for system, rates in (("fused_row_wise", cluster.fused), ("table_wise", cluster.stock)):
        estimated = rates_of(gpu, system)
        assert (rates.lookup, rates.pooling) == (estimated["lookup"], estimated["pooling"])
        assert rates.ids <= estimated["ids"]  # a guess, but not a better one than bytes allow
        assert rates.step >= LAUNCHES[system] * 4


def test_launches_are_those_that_are_counted() -> None:
    from tests.emulated_cuda.test_budget import SHARDINGS, SIMPLE

    for system, launches in LAUNCHES.items():
        assert SHARDINGS[f"{SIMPLE} | {system}"].kernels == launches


@pytest.mark.parametrize("system", LAUNCHES)
def test_a_faster_memory_makes_only_work_shorter(system: str) -> None:
    tables, batch = tables_of(REFERENCE)
    slow, fast = (roofline(system, tables, batch, cluster_of("a100"), g) for g in GPUS.values())
    for a, b in zip(slow, fast, strict=True):
        if a.is_collective or a.name == "launches":
            assert a == b
        else:
            assert b.seconds < a.seconds and a.amount == b.amount


def test_tables_of_the_documentation_are_up_to_date() -> None:
    text = (ROOT / "docs" / "gpu.md").read_text()
    assert stages().markdown() in text
    assert traffic().markdown() in text
