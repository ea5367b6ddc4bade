"""The doctor on real ranks, of CPU or of GPUs."""

import json
import sys
from pathlib import Path

import pytest
import torch

from fusedrec_torchrec.cli.main import main
from fusedrec_torchrec.doctor import examination
from fusedrec_torchrec.doctor.benchmark import BENCHMARK, judged
from fusedrec_torchrec.doctor.comparison import COMPARISONS
from fusedrec_torchrec.doctor.findings import Finding, read_findings
from tests.emulated_cuda import is_emulated
from tests.emulated_cuda.program import executable
from tests.warm import interpreter

Capture = pytest.CaptureFixture[str]


def doctor(path: Path, device: str, *more: str) -> tuple[int, dict[str, Finding], str]:
    runs = str(path.parent / "runs")
    code = main(["doctor", "--device", device, "--output", str(path), "--runs", runs, *more])
    report = read_findings(path)
    return code, {finding.name: finding for finding in report.findings}, report.verdict


@pytest.mark.skipif(torch.cuda.is_available(), reason="as on a machine without a GPU")
def test_cpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    monkeypatch.setattr(sys, "executable", interpreter())
    path = tmp_path / "report.md"
    code, found, verdict = doctor(path, "cpu")
    assert code == 0, path.read_text()
    assert verdict.startswith("Nothing failed, but 5 skipped and so unknown")
    assert {name for name, finding in found.items() if finding.outcome == "skipped"} == {
        *("CUDA", "GPUs", "peer access", "Triton kernels", "NCCL"),
    }
    assert all(found[comparison.name].outcome == "good" for comparison in COMPARISONS)
    assert found["ranks"].detail == "2 ranks exchanged rows with gloo"
    assert found["fused_row_wise as unsharded"].figures["collectives"] == [3, 3]
    times = found[BENCHMARK].figures["step_ms"]
    assert (
        found[BENCHMARK].outcome == "good" and min(times["fused_row_wise"], times["row_wise"]) > 0
    )
    assert "median of 5 pairs" in found[BENCHMARK].detail
    named = ("compiler", "backends", "shared memory", "file handles", "locks of the file system")
    assert all(found[name].outcome == "good" for name in (*named, "room for runs", "versions"))
    text = path.read_text()
    assert str(Path.home()) not in text and str(tmp_path) not in text
    shown = capsys.readouterr().out
    assert verdict in shown and "## Machine" in shown and "processor: " in shown
    assert shown.partition("report: ")[0].strip() == text.partition("<details>")[0].strip()
    assert len(text) < 65_536  # what an issue may have


@pytest.mark.skipif(torch.cuda.is_available(), reason="as on a machine without a GPU")
def test_without_a_gpu_cuda_has_failed(tmp_path: Path) -> None:
    code, found, verdict = doctor(tmp_path / "report.md", "cuda")
    assert code == 1
    assert found["CUDA"].outcome == "failed"
    assert all(found[comparison.name].detail == "there is no GPU" for comparison in COMPARISONS)
    assert found[BENCHMARK].detail == "there is no GPU"
    assert "All good" not in verdict


@pytest.mark.parametrize(
    ("program", "trouble"),
    [
        ("exec sleep 60", "not done after 1 seconds"),
        ("echo out of memory; exit 3", "rank 0 ended with code 3\nout of memory"),
        ("exit 0", ""),
    ],
)
def test_ranks_that_hang_or_die_or_say_nothing_are_no_good(
    program: str, trouble: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    python = tmp_path / "python"
    python.write_text(f"#!/bin/sh\n{program}\n")
    python.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(python))
    code, found, verdict = doctor(tmp_path / "report.md", "cpu", "--timeout", "1")
    assert all(found[comparison.name].outcome == "skipped" for comparison in COMPARISONS)
    assert found[BENCHMARK].outcome == "skipped"
    assert found["ranks"].detail == (trouble or "they ended without an answer")
    assert code == 1 and verdict.startswith("1 failed")


def test_weights_that_nobody_has_and_numbers_that_are_off_have_failed() -> None:
    comparison = COMPARISONS[0]
    answer = {"outputs": 0.0, "weights": 0.0, "compared": 50, "elements": 100}
    judged = examination._judged(comparison, [answer, {**answer, "compared": 50}])
    assert judged.outcome == "good"
    judged = examination._judged(comparison, [answer, {**answer, "compared": 0}])
    assert judged.outcome == "failed" and judged.detail == "50 of 100 weights are on some rank"
    for key in ("outputs", "weights"):
        for off in (1e-3, float("inf"), float("nan")):
            judged = examination._judged(comparison, [answer, {**answer, key: off}])
            assert judged.outcome == "failed"
    assert examination._judged(comparison, [answer, None]).outcome == "failed"


def test_the_slowest_rank_counts_in_each_pair_of_the_benchmark() -> None:
    fast = {"fused_row_wise": [0.001] * 5, "row_wise": [0.002] * 5}
    slow = {"fused_row_wise": [0.002] * 5, "row_wise": [0.003] * 5}
    both = judged([fast, slow])
    assert both.figures["step_ms"] == {"fused_row_wise": 2.0, "row_wise": 3.0}
    assert "1.50 [1.50, 1.50] times as long" in both.detail
    assert judged([fast]).figures["step_ms"]["row_wise"] == 2.0
    error = {"error": "Traceback\nValueError: no"}
    assert examination._judged_benchmark([fast, error]).outcome == "failed"
    assert examination._judged_benchmark([fast, None]).outcome == "skipped"


def test_findings_for_programs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    monkeypatch.setattr(examination, "_computes", lambda *_: iter([]))
    output = tmp_path / "report.md"
    arguments = ["doctor", "--output", str(output), "--runs", str(tmp_path), "--json"]
    code = main(arguments)
    shown = json.loads(capsys.readouterr().out)
    assert set(shown) == {"version", "title", "verdict", "machine", "findings"}
    assert shown["verdict"] == read_findings(output).verdict
    assert code == any(finding["outcome"] == "failed" for finding in shown["findings"])


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_cuda(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if is_emulated():
        monkeypatch.setattr(sys, "executable", executable(tmp_path))
        # Kernels compute nothing in this process, only in those of ranks: see test_installation.
        monkeypatch.setattr("fusedrec_torchrec.doctor.installation._cuda", _not_here)
        monkeypatch.setattr("fusedrec_torchrec.doctor.installation._triton", _not_here)
    path = tmp_path / "report.md"
    code, found, verdict = doctor(path, "cuda")
    assert code == 0, path.read_text()
    assert all(found[comparison.name].outcome == "good" for comparison in COMPARISONS)
    figures = found["fused_row_wise as unsharded"].figures
    assert set(figures["collectives"]) == {3}
    assert ("All good" in verdict) == all(f.outcome == "good" for f in found.values())


def _not_here() -> Finding:
    return Finding("emulated", "skipped", "the GPU is emulated")
