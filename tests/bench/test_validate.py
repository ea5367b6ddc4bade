"""Predictions against measurements, on a small run of real processes."""

from pathlib import Path

import pytest
import yaml

from fusedrec_torchrec.bench.suite import SuiteConfig, WorkloadConfig
from fusedrec_torchrec.bench.validate import (
    Comparison,
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
from tests.cli.command import ROOT


def small_suite() -> SuiteConfig:
    workload = WorkloadConfig(name="small", tables=4, rows=2000, batch_size=256, dims=[16, 32])
    systems = ["table_wise", "row_wise", "column_wise", "fused_row_wise", "fused_hot"]
    return SuiteConfig(systems=systems, pairs=5, steps=1, workloads=[workload])  # type: ignore[arg-type]


@pytest.mark.slow
def test_bytes_are_predicted_to_two_percent(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cluster = ClusterConfig(device="cpu", ranks=2)
    cluster_file(tmp_path, 2, "").write_text(to_yaml(cluster))  # as if it had been measured
    found = validate(small_suite(), None, tmp_path, None, progress=False)
    assert [each.system for each in found] == [*small_suite().systems]
    for each in found:
        assert abs(each.bytes_off) < 0.02, each
        assert each.seconds_measured > 0 and each.seconds_predicted > 0
    assert (tmp_path / "predicted.png").stat().st_size > 5000
    assert compare_again(tmp_path, None) == found
    print_validation(found)
    shown = capsys.readouterr().out
    assert "bytes: 5 of 5 within 2%" in shown and "best system: within 5%" in shown


@pytest.mark.slow
def test_a_cluster_is_calibrated_where_ranks_will_be(tmp_path: Path) -> None:
    found = calibrate_cluster(tmp_path, 2, "", small_suite())
    assert (found.ranks, found.name) == (2, "2 ranks, loopback")
    assert found.table_wise is not None and found.fused.hot > 0


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
    assert set(ranks_and_links(workloads)) == {(2, ""), (4, ""), (2, "1gbit"), (4, "1gbit")}
