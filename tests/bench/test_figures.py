"""What is made of measurements."""

from typing import Any

import numpy as np
import pytest

from fusedrec_torchrec.bench.figures import WorkloadFigures
from fusedrec_torchrec.bench.report import tables
from fusedrec_torchrec.bench.statistics import paired_ratio


def collective(name: str, dtype: str, size: int) -> dict[str, object]:
    return {"name": name, "dtype": dtype, "bytes_sent": size}


def result(**measured: Any) -> dict[str, Any]:
    fused = [collective("all_to_all", "int32", 10)] + [collective("all_to_all", "float32", 500)] * 2
    row_wise = [
        collective("all_to_all", "int64", 100),
        collective("reduce_scatter", "float32", 1000),
        collective("all_gather", "float32", 1000),
    ]
    stages = {"dedup": 0.25, "update": 0.5, "other": 0.25, "step": 1.0}
    return {
        "workload": {"name": "w"},
        "measured": {
            "left_out": {},
            "seconds": {
                "table_wise": [4.0, 6.0, 8.0, 4.2, 40.0],
                "row_wise": [5.0, 7.0, 9.0, 5.1, 5.2],
                "fused_row_wise": [2.0, 3.0, 4.0, 2.0, 2.0],
            },
            "bound_seconds": {
                "exchange": [0.5, 0.5, 1.0, 0.5, 0.5],
                "lookup": [0.5, 1.0, 1.0, 0.5, 0.5],
                "gather": [0.0, 0.0, 0.0, 0.0, 0.0],
            },
            "wire": {
                "table_wise": [[collective("all_to_all", "float32", 2000)]] * 2,
                "row_wise": [row_wise] * 2,
                "fused_row_wise": [fused] * 2,
            },
            "memory": {"table_wise": 2 << 20, "row_wise": 3 << 20, "fused_row_wise": 1 << 19},
            "phases": stages,
            "ids": 100,
            "unique": 30,
            "outputs": 60,
            "planner_picks": {"fused_row_wise": 2, "table_wise": 1},
            "unique_remote_bytes": 1000,
            **measured,
        },
    }


def test_medians_of_paired_ratios_do_not_mind_drift() -> None:
    drift = np.linspace(1, 3, 9)
    ratio = paired_ratio(list(2 * drift), list(drift))
    assert ratio.median == pytest.approx(2)
    assert ratio.low == pytest.approx(2)
    assert ratio.high == pytest.approx(2)


def test_the_interval_holds_the_true_ratio_about_as_often_as_it_says() -> None:
    generator = np.random.default_rng(1)
    held = 0
    for _ in range(200):
        noise = generator.lognormal(0, 0.2, size=(2, 15))
        ratio = paired_ratio(list(3 * noise[0]), list(noise[1]))
        held += ratio.low <= 3 <= ratio.high
    assert 0.88 <= held / 200 <= 1


def test_the_best_stock_system_has_the_smallest_median() -> None:
    figures = WorkloadFigures(result())
    assert figures.best_stock is not None and figures.best_stock.name == "row_wise"
    assert figures.best_stock.milliseconds == pytest.approx(5200)
    assert figures.speed_up is not None
    assert figures.speed_up.median == pytest.approx(2.5)
    assert figures.advice == "fused_row_wise"


def test_stock_is_advised_where_fused_is_slower() -> None:
    slow = result()
    slow["measured"]["seconds"]["fused_row_wise"] = [5.6, 7.9, 10.0, 5.7, 5.8]
    assert WorkloadFigures(slow).advice == "row_wise"
    slow["measured"]["seconds"]["fused_row_wise"] = [5.2, 7.2, 9.2, 5.2, 5.4]  # 4 % are tolerated
    assert WorkloadFigures(slow).advice == "fused_row_wise"


def test_bytes_of_all_ranks() -> None:
    figures = WorkloadFigures(result())
    assert figures.row_bytes == 2000
    assert figures.least_row_bytes == 2000
    assert figures.id_bytes == 20
    assert figures.fused is not None and figures.fused.collectives == 3
    assert figures.systems["row_wise"].bytes_sent == 4200
    assert figures.systems["row_wise"].gloo_bytes_sent == 6200


def test_efficiency_is_the_median_of_bounds_over_steps() -> None:
    efficiency = WorkloadFigures(result()).efficiency
    assert efficiency is not None
    assert efficiency.median == pytest.approx(0.5)


def test_tables_have_a_line_for_each_workload() -> None:
    workloads = [WorkloadFigures(result()), WorkloadFigures(result())]
    found = {table.title: table for table in tables(workloads)}
    assert len(found) == 6
    for table in found.values():
        assert len(table.rows) == 2
        assert {len(row) for row in table.rows} == {len(table.columns)}
        assert table.markdown().count("\n") == 3
    (memory,) = (table for title, table in found.items() if "memory" in title)
    assert memory.rows[0] == ("w", "2.0 MiB", "3.0 MiB", "512.0 KiB")
