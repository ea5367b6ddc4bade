"""Bytes of kernels and the least time of a step, counted from shapes."""

import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from fusedrec_torchrec.access.row_classes import RowClasses
from fusedrec_torchrec.core.gpu.segments import FEW
from fusedrec_torchrec.core.gpu.traffic import Shape, kernels
from fusedrec_torchrec.planner.cost.roofline import (
    GPUS,
    LAUNCHES,
    fbgemm_backward,
    fbgemm_forward,
    roofline,
    with_many_ids,
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

# Bytes of all kernels in units of the least: as asked, and every element once.  Wanted: 1.3 once.
MOST = {"one id per bag": (1.32, 1.10), "bags of 10 ids": (2.86, 1.26)}


def test_kernels_read_and_write_no_more_than_they_did() -> None:
    assert MOST.keys() == WORKLOADS.keys()
    for workload, (most_asked, most_once) in MOST.items():
        asked, once, least = ratios(workload)
        assert least == 1 <= once <= asked
        assert asked <= most_asked and once <= most_once


def test_no_kernel_needs_less_than_the_least() -> None:
    shapes = (
        Shape(ids=1000, unique=400, bags=300, asked=400, dim=16),
        Shape(ids=1000, unique=400, bags=300, asked=400, dim=16, long=3, pieces=5),
        Shape(ids=1000, unique=1, bags=300, asked=1, dim=16, long=1, pieces=16),
        Shape(ids=1000, unique=1000, bags=1000, asked=1000, dim=16),
    )
    for kernel in [kernel for shape in shapes for kernel in kernels(shape)]:
        assert kernel.asked >= kernel.once >= kernel.least >= 0, kernel


def test_bytes_by_hand() -> None:
    shape = Shape(ids=6, unique=4, bags=3, asked=5, dim=8)
    counted = {kernel.kernel: kernel for kernel in kernels(shape)}
    assert shape.places == 64
    assert counted["slot_bag_sums"].asked == 6 * 4 + 6 * 32 + 3 * 8 + 3 * 32
    assert counted["slot_bag_sums"].least == 6 * 4 + 4 * 32 + 3 * 4 + 3 * 32
    # Ids, place and rank of each; keys and numbers of rows; two more ids of a row are counted, and
    # look at places of their own when others take theirs.
    inserted = 6 * (8 + 4 + 4) + 4 * (4 + 4) + 2 * 8 + 2 * 4
    assert counted["number_batch_rows: zeros"].asked == 64 * 8
    assert counted["number_batch_rows: insert"].asked == inserted + 6 * 4 * shape.probes
    # Place, key, number and row of each id; of each row ids, key, start and ids of its segment.
    assert counted["number_batch_rows: rows_of_ids"].asked == 6 * 16 + 4 * 16
    # Row, rank, start and bag of each id, and offsets of bags.
    assert counted["slot_row_sums: place_bags"].asked == 6 * 16 + 3 * 8
    # Segments and first bags of rows, bags and gradients of ids, sums.
    assert counted["slot_row_sums: sums"].asked == 4 * (8 + 4) + 6 * (4 + 32) + 4 * 32
    assert counted["slot_row_sums: sums"].once == 4 * 8 + 6 * 4 + 3 * 32 + 4 * 32
    assert counted["unpack"].asked == 5 * 8
    assert fbgemm_forward(6, 3, 8) == 6 * (8 + 32) + 3 * (8 + 32)
    # Two passes for 2^16 rows.
    sort = 6 * 24 + 2 * 12 * 2 * 6 + 6 * 8 + 4 * 12
    assert fbgemm_backward(6, 4, 3, 8, 1 << 16) == sort + 6 * 32 + 2 * 4 * 36


def test_rows_with_many_ids_are_written_before_they_are_added_to() -> None:
    few = Shape(ids=1000, unique=10, bags=1000, asked=10, dim=8)
    many = replace(few, long=2, pieces=9)
    place, sums = (
        {k.kernel: k for k in kernels(many)}[f"slot_row_sums: {name}"].once
        - {k.kernel: k for k in kernels(few)}[f"slot_row_sums: {name}"].once
        for name in ("place_bags", "sums")
    )
    assert place == 2 * 32 + 9 * 4  # zeros, and which row a piece is of
    assert sums == 2 * 32 + 9 * 12  # read and written, not only written


def test_how_many_rows_have_many_ids_is_what_chance_gives() -> None:
    classes = RowClasses.zipf(2000, 1.1)
    shares = np.repeat(classes.shares_C, classes.rows_C.astype(int))
    drawn = np.random.default_rng(0).multinomial(20_000, shares / shares.sum(), size=50)
    long, ids = with_many_ids(classes, 20_000)
    assert long == pytest.approx((drawn > FEW).sum(1).mean(), rel=0.02)
    assert ids == pytest.approx((drawn * (drawn > FEW)).sum(1).mean(), rel=0.02)
    assert with_many_ids(RowClasses.uniform(10**6), 1000) == pytest.approx((0, 0), abs=1e-6)


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
