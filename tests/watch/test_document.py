"""The figures that all views show."""

import json
import math
from pathlib import Path
from typing import Any

import pytest

from fusedrec_torchrec.watch.document import document_of, thinned
from fusedrec_torchrec.watch.panels import PANELS
from fusedrec_torchrec.watch.run import open_runs
from tests.watch.runs import evaluation, record, whole_run, write_run


def document(*folders: Path) -> dict[str, Any]:
    return document_of(open_runs(folders))


def test_figures_are_those_of_the_records(tmp_path: Path) -> None:
    shown = document(whole_run(tmp_path, skipped_steps=2))
    (run,) = shown["runs"]
    assert run["curves"]["log_loss"]["train"] == [(s, 0.7 - s / 1000) for s in range(10, 51, 10)]
    assert run["curves"]["log_loss"]["eval"] == [(50, 0.66)]
    assert run["latest"]["auc"] == {"eval": 0.75}
    assert run["latest"]["busiest_to_mean"] == {"train": 1.5}
    assert run["bytes_by_collective"] == {"all_to_all": 4000, "all_reduce": 1000}
    assert run["collectives_per_step"] == {"all_to_all": 3, "all_reduce": 1}
    assert run["rows_by_rank"] == [300, 100] and run["bytes_by_rank"] == [5000, 6000]
    assert run["stage_ms"] == {"dedup": 0.5, "lookup": 1.5, "other": 3.0}
    assert run["skipped_steps"] == 2 and run["failed_saves"] == 0
    keys = {panel["key"] for panel in shown["panels"]}
    assert {"log_loss", "auc", "samples_per_second", "hot_share_of_rows", "skipped_steps"} <= keys
    assert "Calibration" in shown["missing"] and "calibration" not in keys
    assert len(shown["panels"]) + len(shown["missing"]) == len(PANELS)


def test_a_run_without_records_has_no_figures(tmp_path: Path) -> None:
    shown = document(write_run(tmp_path, []))
    (run,) = shown["runs"]
    assert shown["panels"] == [] and run["latest"] == {} and run["rows_by_rank"] == []
    assert run["state"] == "waiting"


def test_what_is_no_number_is_left_out_and_json_can_hold_the_rest(tmp_path: Path) -> None:
    odd = {"log_loss": math.nan, "auc": math.inf, "rows_looked_up_by_rank": [1, None]}
    odd |= {"stage_ms": {"rows": math.nan, "ids": 2.0}, "all_to_all_bytes_per_step": None}
    write_run(tmp_path, [record(10), record(20, **odd), evaluation(20, log_loss=None)])
    (run,) = document(tmp_path)["runs"]
    assert run["latest"]["log_loss"]["train"] == pytest.approx(0.69)
    assert run["rows_by_rank"] == [300, 100]
    assert run["bytes_by_collective"] == {"all_reduce": 1000}
    assert run["stage_ms"]["ids"] == 1.0 and "rows" not in run["stage_ms"]
    json.dumps(run, allow_nan=False)


def test_stages_are_a_mean_of_the_last_records(tmp_path: Path) -> None:
    records = [record(step, stage_ms={"ids": float(step)}) for step in range(10, 101, 10)]
    write_run(tmp_path, records)
    (run,) = document(tmp_path)["runs"]
    assert run["stage_ms"] == {"ids": 80.0}  # of steps 60 to 100


def test_long_curves_keep_their_peaks_and_their_end() -> None:
    points = [(step, math.sin(step / 50)) for step in range(10_000)]
    points[3333] = (3333, 9.0)
    points[7777] = (7777, -9.0)
    kept = thinned(points, 100)
    assert len(kept) <= 101 and set(kept) <= set(points)
    assert {(3333, 9.0), (7777, -9.0), points[-1]} <= set(kept)
    assert kept == sorted(kept)
    assert thinned(points[:100], 100) == points[:100]
