"""What is made of measurements."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fusedrec_torchrec.bench.figures import WorkloadFigures, side_by_side
from fusedrec_torchrec.bench.plots import draw
from fusedrec_torchrec.bench.report import crossover, memory, speeds, tables, traffic
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


def both_allocators() -> list[WorkloadFigures]:
    kept = result()
    kept["allocator"] = "keep"
    kept["measured"]["seconds"]["row_wise"] = [3.0, 4.5, 6.0, 3.0, 3.0]
    return [WorkloadFigures(result()), WorkloadFigures(kept)]


def test_allocators_stand_side_by_side() -> None:
    workloads = [*both_allocators(), *both_allocators()]
    assert [list(group) for group in side_by_side(workloads)] == [["default", "keep"]] * 2
    table = speeds(workloads)
    assert len(table.rows) == 2
    cells = dict(zip(table.columns, table.rows[0], strict=True))
    assert cells["row_wise"] == "5200.0 / 3000.0"
    assert cells["best stock / fused"].startswith("2.50 ")
    assert cells["best stock / fused, memory kept"].startswith("1.50 ")
    assert table.title.endswith("default allocator / memory kept")
    cells = dict(zip(crossover(workloads).columns, crossover(workloads).rows[0], strict=True))
    assert cells["best stock / fused, memory kept"].startswith("1.50 ")
    assert memory(workloads).rows[0][1] == "2.0 MiB / 2.0 MiB"
    assert {table.rows[1][0] for table in tables(workloads) if len(table.rows) == 4} == {
        "w, memory kept"
    }


def test_plots_show_both_allocators(tmp_path: Path) -> None:
    drawn = {path.name for path in draw(both_allocators(), tmp_path)}
    assert drawn == {"speed_up.png", "breakdown.png", "bytes.png"}


def test_one_allocator_has_no_columns_of_its_own() -> None:
    table = speeds([WorkloadFigures(result())])
    assert table.columns[-2:] == ("best stock", "best stock / fused")
    assert "memory kept" not in " ".join((table.title, *table.columns))


def with_planner() -> dict[str, Any]:
    """Returns a result in which our planner's plan is fastest, with what batches ask for."""
    found = result(distinct_bags=15)
    measured = found["measured"]
    kinds = {"int32": "ids", "int64": "ids", "float32": "rows"}
    for ranks in measured["wire"].values():
        for collectives in ranks:
            collectives[:] = [{**c, "kind": kinds[str(c["dtype"])]} for c in collectives]
            if len(collectives) > 1:
                collectives[-1]["kind"] = "gradients"
    for part in ("seconds", "wire", "memory"):
        measured[part]["fused_planner"] = measured[part]["fused_row_wise"]
    measured["seconds"]["fused_row_wise"] = [1.0, 1.5, 2.0, 1.0, 1.0]
    asked = {"own_elements": 250, "least_elements": 500}
    measured["requests"] = dict.fromkeys(measured["seconds"], asked)
    return found


def test_our_planner_is_compared_and_the_best_of_ours_beside_it() -> None:
    figures = WorkloadFigures(with_planner())
    assert figures.fused is not None and figures.fused.name == "fused_planner"
    assert figures.advice == "fused_planner"
    assert figures.speed_up is not None and figures.speed_up.median == pytest.approx(2.5)
    assert figures.best_ours is not None and figures.best_ours.name == "fused_row_wise"
    assert figures.best_speed_up is not None
    assert figures.best_speed_up.median == pytest.approx(5)
    assert figures.efficiency is not None and figures.efficiency.median == pytest.approx(0.5)
    assert "best stock / best of ours" in speeds([figures]).columns
    assert figures.bags_per_output == pytest.approx(0.25)


def test_bytes_by_kind_and_rows_against_the_least() -> None:
    figures = WorkloadFigures(with_planner())
    fused = figures.systems["fused_planner"]
    assert fused.bytes_by_kind == {"ids": 20, "rows": 1000, "gradients": 1000}
    # 1000 bytes are 250 elements on the wire, and 250 that ranks get from themselves.
    assert fused.rows_over_least == pytest.approx(1.0)
    lines = {row[1]: row[2:] for row in traffic([figures]).rows}
    assert lines["fused_planner"] == ("3", "20 B", "1000 B", "1000 B", "1.000")
    assert set(lines) == set(figures.systems)


def test_without_all_bounds_there_is_no_efficiency() -> None:
    partial = with_planner()
    del partial["measured"]["bound_seconds"]["lookup"]
    figures = WorkloadFigures(partial)
    assert figures.efficiency is None
    (bounds,) = (table for table in tables([figures]) if "lower bounds" in table.title)
    assert dict(zip(bounds.columns, bounds.rows[0], strict=True))["lookup"] == ""
    partial["measured"]["bound_seconds"] = {}
    partial["measured"]["phases"] = {}
    titles = " ".join(table.title for table in tables([WorkloadFigures(partial)]))
    assert "lower bounds" not in titles and "stages" not in titles
