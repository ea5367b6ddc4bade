"""Predictions against measurements, on a small run of real processes."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from fusedrec_torchrec.bench.suite import SuiteConfig, WorkloadConfig
from fusedrec_torchrec.bench.validate import (
    Comparison,
    Predictor,
    best_systems,
    calibrate_cluster,
    cluster_file,
    compare_again,
    print_validation,
    ranks_and_links,
    validate,
    verdict,
)
from fusedrec_torchrec.core.config import to_yaml
from fusedrec_torchrec.planner.cost.cluster import ClusterConfig
from fusedrec_torchrec.planner.cost.step import Step
from tests.cli.command import ROOT


def small_suite() -> SuiteConfig:
    """Bytes are those of one batch, so it has enough tables and samples for luck to even out."""
    small = WorkloadConfig(
        name="small",
        tables=16,
        rows=2000,
        batch_size=1024,
        dims=[16, 32],
        systems=["table_wise", "row_wise", "column_wise", "fused_row_wise", "fused_hot"],
    )
    bags = replace(
        small,
        name="repeated bags",
        pooling=5.0,
        bags="repeated",
        systems=["fused_table_wise", "fused_column_wise", "fused_mixed", "fused_profiled"],
    )
    return SuiteConfig(pairs=5, steps=1, workloads=[small, bags])


@pytest.mark.slow
def test_bytes_are_predicted_to_two_percent(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cluster = ClusterConfig(device="cpu", ranks=2)
    cluster_file(tmp_path, 2, "").write_text(to_yaml(cluster))  # as if it had been measured
    found = validate(small_suite(), None, tmp_path, None, progress=False)
    wanted = [(w.name, system) for w in small_suite().workloads for system in w.systems]
    assert [(each.workload, each.system) for each in found] == wanted
    for each in found:
        assert abs(each.bytes_off) < 0.02, each
        assert each.seconds_measured > 0 and each.seconds_predicted > 0
    assert (tmp_path / "predicted.png").stat().st_size > 5000
    assert compare_again(tmp_path, None) == found
    print_validation(found)
    shown = capsys.readouterr().out
    assert "bytes: 9 of 9 within 2%" in shown and "best system: within 5%" in shown


@pytest.mark.slow
def test_a_cluster_is_calibrated_where_ranks_will_be(tmp_path: Path) -> None:
    found = calibrate_cluster(tmp_path, 2, "", small_suite())
    assert (found.ranks, found.name) == (2, "2 ranks, loopback")
    assert found.table_wise is not None and found.fused.hot > 0
    assert found.fused.bag_ids is not None and found.fused.bag_lookup is not None


def predicted(system: str, **fields: Any) -> Step | None:
    return Predictor(None).step(system, replace(small_suite().workloads[0], **fields))


def amounts(step: Step | None) -> dict[str, list[float]]:
    assert step is not None
    return {stage.name: stage.amount_W.tolist() for stage in step.stages}


def test_tables_are_pooled_where_the_system_has_them() -> None:
    """Sixteen tables, of 16 and 32 columns by turns, on two ranks."""
    rows = amounts(predicted("fused_row_wise", pooling=5.0))
    assert "bag_lookup" not in rows
    whole, columns = (
        amounts(predicted(system, pooling=5.0))
        for system in ("fused_table_wise", "fused_column_wise")
    )
    assert whole["bag_lookup"] == pytest.approx(columns["bag_lookup"])
    assert whole["rows"] == pytest.approx(columns["rows"])  # as many columns on each rank
    assert columns["ids"] > whole["ids"], "ids go to both ranks"
    mixed = predicted("fused_mixed", pooling=5.0)
    assert mixed is not None and mixed.buckets == 5  # 16 and 32 columns by rows and whole, and 8
    assert 0 < sum(amounts(mixed)["bag_lookup"]) < sum(whole["bag_lookup"])


def test_a_plan_is_predicted_by_who_pools_in_it() -> None:
    """Owners pool if a law of rows says so, and also if repeated bags were counted."""
    for system in ("fused_planner", "fused_profiled"):
        step = predicted(system, pooling=5.0, bags="repeated")
        assert "bag_lookup" in amounts(step), system
        assert "bag_lookup" not in amounts(predicted(system)), "bags of one id"


def test_bags_that_repeat_are_sent_once() -> None:
    fresh, repeated = (
        amounts(predicted("fused_table_wise", pooling=5.0, bags=bags))
        for bags in ("fresh", "repeated")
    )
    assert sum(repeated["rows"]) < 0.7 * sum(fresh["rows"])


def compared(system: str, predicted: float, measured: float, sent: float = 100.0) -> Comparison:
    return Comparison("w", system, 2, "", 100.0, sent, predicted, measured)


def test_the_verdict() -> None:
    found = [compared("a", 1.0, 2.0), compared("b", 2.0, 1.9), compared("c", 3.0, 3.0, 90.0)]
    predicted, measured, slower = best_systems(found)["w"]
    assert (predicted, measured) == ("a", "b") and slower == pytest.approx(2.0 / 1.9 - 1)
    lines = verdict(found)
    assert "2 of 3 within 2%, largest error 11.1%" in lines[0]
    assert "median error 5.3%" in lines[1] and "largest 50%" in lines[1]
    assert "in 0 of 1" in lines[2]


def test_the_suite_in_the_repository() -> None:
    data = yaml.safe_load((ROOT / "benchmarks" / "validate.yaml").read_text())
    workloads = SuiteConfig(**data).expanded()
    assert len(workloads) >= 12
    systems = {system for workload in workloads for system in workload.systems}
    assert {"fused_table_wise", "fused_column_wise", "fused_mixed", "fused_profiled"} <= systems
    assert any(workload.bags == "repeated" for workload in workloads)
    assert set(ranks_and_links(workloads)) == {(2, ""), (4, ""), (2, "1gbit"), (4, "1gbit")}
