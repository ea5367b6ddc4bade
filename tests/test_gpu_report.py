"""What `make test-gpu` says: on a machine without a GPU, and about what was skipped."""

import json
import os
import subprocess
from pathlib import Path

import pytest
import torch

from fusedrec_torchrec.bench.results import RESULTS
from fusedrec_torchrec.core.config import load_yaml
from fusedrec_torchrec.doctor.findings import Findings
from tests import gpu_report

ROOT = Path(__file__).parents[1]
XML = """<testsuites><testsuite>
<testcase classname="tests.a" name="test_good"/>
<testcase classname="tests.a" name="test_two"><skipped message="needs two GPUs"/></testcase>
{more}</testsuite></testsuites>"""


@pytest.mark.skipif(torch.cuda.is_available(), reason="as on a machine without a GPU")
def test_without_a_gpu_it_ends_at_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert gpu_report.main(["--output", str(tmp_path / "report")]) == 2
    assert "make test-gpu: torch finds no CUDA device" in capsys.readouterr().err
    assert not (tmp_path / "report").exists()


def test_make_ends_at_once_without_a_driver(tmp_path: Path) -> None:
    (tmp_path / "nvidia-smi").write_text("#!/bin/sh\nexit 9\n")
    (tmp_path / "nvidia-smi").chmod(0o755)
    done = subprocess.run(
        ["make", "test-gpu"],
        cwd=ROOT,
        env={**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode != 0
    assert "make test-gpu needs a GPU: nvidia-smi finds none" in done.stdout
    assert not (ROOT / ".venv-gpu").exists()


def test_an_emulated_gpu_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(gpu_report, "is_emulated", lambda: True)
    assert gpu_report.main([]) == 2
    assert "the GPU is emulated" in capsys.readouterr().err


def test_skipped_tests_are_listed_and_nothing_is_all_good(tmp_path: Path) -> None:
    path = tmp_path / "results.xml"
    path.write_text(XML.format(more=""))
    report = Findings("", {}, list(gpu_report.tests_of(path, "gpu")))
    assert report.verdict == "Nothing failed, but 1 skipped and so unknown; 1 good."
    assert "- **gpu: tests.a.test_two**: needs two GPUs" in report.text()


def test_failed_tests_and_runs_without_tests_have_failed(tmp_path: Path) -> None:
    path = tmp_path / "results.xml"
    more = (
        '<testcase classname="c" name="n"><failure message="m">line\nE 1 != 2</failure></testcase>'
    )
    path.write_text(XML.format(more=more))
    (bad,) = Findings("", {}, list(gpu_report.tests_of(path, "gpu"))).of("failed")
    assert bad.detail == "line\nE 1 != 2"
    path.write_text("<testsuites><testsuite/></testsuites>")
    assert Findings("", {}, list(gpu_report.tests_of(path, "gpu"))).has_failed
    path.unlink()
    assert Findings("", {}, list(gpu_report.tests_of(path, "gpu"))).has_failed


@pytest.mark.parametrize(
    ("program", "detail"),
    [("exit 7", "pytest ended without results"), ("echo race; touch $X; exit 7", "ended with")],
)
def test_what_ends_with_a_code_has_failed(
    program: str, detail: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    python = tmp_path / "python"
    text = XML.format(more="").replace("\n", "")
    program = program.replace("touch $X", f"echo '{text}' > \"${{4#*=}}\"")
    python.write_text(f"#!/bin/sh\n{program}\n")
    python.chmod(0o755)
    monkeypatch.setattr(gpu_report.sys, "executable", str(python))  # type: ignore[attr-defined]
    found = list(gpu_report._pytest("sanitizer", tmp_path, ["tests"]))
    assert next(f.detail for f in found if f.outcome == "failed").startswith(detail)
    assert not any(f.outcome == "good" for f in found)


def test_what_a_benchmark_leaves_out_is_listed(tmp_path: Path) -> None:
    document = {"left_out": {"big": "needs 8 GPUs, there are 2"}, "failed": {"x": "died"}}
    (tmp_path / RESULTS).write_text(json.dumps({**document, "results": []}))
    found = {f.name: f for f in gpu_report.benchmarks_of(tmp_path)}
    assert found["benchmark: big"].outcome == "skipped"
    assert found["benchmark: x"].outcome == "failed"
    (tmp_path / RESULTS).write_text(json.dumps({"left_out": {}, "failed": {}, "results": []}))
    assert next(gpu_report.benchmarks_of(tmp_path)).outcome == "failed"


def test_all_workloads_get_as_many_ranks_as_there_are_gpus() -> None:
    suite = load_yaml(ROOT / "benchmarks" / "gpu.yaml")
    assert len(suite["workloads"]) == gpu_report.WORKLOADS
    assert not any("ranks" in workload.get("sweep", {}) for workload in suite["workloads"])
