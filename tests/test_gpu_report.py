"""What `make test-gpu` says: on a machine without a GPU, and about what was skipped."""

import json
import os
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from fusedrec_torchrec.bench.results import RESULTS
from fusedrec_torchrec.core.config import load_yaml
from fusedrec_torchrec.doctor.findings import Finding, Findings, good, read_findings
from tests import gpu_report

ROOT = Path(__file__).parents[1]
XML = """<testsuites><testsuite>
<testcase classname="tests.a" name="test_good"/>
<testcase classname="tests.a" name="test_two"><skipped message="needs two GPUs"/></testcase>
{more}</testsuite></testsuites>"""
DONE = gpu_report.Done(0, "")


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
    report = Findings("", {}, list(gpu_report.tests_of(path, "gpu", DONE)))
    assert report.verdict == "Nothing failed, but 1 skipped and so unknown; 1 good."
    assert "- **gpu: tests.a.test_two**: needs two GPUs" in report.text()


def test_failed_tests_and_runs_without_tests_have_failed(tmp_path: Path) -> None:
    path = tmp_path / "results.xml"
    more = (
        '<testcase classname="c" name="n"><failure message="m">line\nE 1 != 2</failure></testcase>'
    )
    path.write_text(XML.format(more=more))
    (bad,) = Findings("", {}, list(gpu_report.tests_of(path, "gpu", DONE))).of("failed")
    assert bad.detail == "line\nE 1 != 2"
    path.write_text("<testsuites><testsuite/></testsuites>")
    assert Findings("", {}, list(gpu_report.tests_of(path, "gpu", DONE))).has_failed
    path.unlink()
    assert Findings("", {}, list(gpu_report.tests_of(path, "gpu", DONE))).has_failed


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
    found = list(gpu_report._pytest("sanitizer", tmp_path, ["tests"], timeout=60))
    assert next(f.detail for f in found if f.outcome == "failed").startswith(detail)
    assert not any(f.outcome == "good" for f in found)


def test_what_a_benchmark_leaves_out_is_listed(tmp_path: Path) -> None:
    document = {"left_out": {"big": "needs 8 GPUs, there are 2"}, "failed": {"x": "died"}}
    (tmp_path / RESULTS).write_text(json.dumps({**document, "results": []}))
    found = {f.name: f for f in gpu_report.benchmarks_of(tmp_path, DONE)}
    assert found["benchmark: big"].outcome == "skipped"
    assert found["benchmark: x"].outcome == "failed"
    (tmp_path / RESULTS).write_text(json.dumps({"left_out": {}, "failed": {}, "results": []}))
    assert next(gpu_report.benchmarks_of(tmp_path, DONE)).outcome == "failed"


@pytest.mark.parametrize("with_results", [False, True])
def test_the_last_lines_of_a_benchmark_that_failed_are_kept(
    tmp_path: Path, with_results: bool
) -> None:
    if with_results:
        (tmp_path / RESULTS).write_text(json.dumps({"left_out": {}, "failed": {}, "results": []}))
    lines = "\n".join([*map(str, range(100)), "CUDA out of memory"])
    first = next(gpu_report.benchmarks_of(tmp_path, gpu_report.Done(3, lines)))
    assert first.outcome == "failed"
    assert "ended with code 3\n86\n" in first.detail and first.detail.endswith("out of memory")


def test_a_run_that_hangs_is_ended_with_all_that_it_has_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    python = tmp_path / "python"
    python.write_text(f"#!/bin/sh\necho said this\nsleep 600 &\necho $! > {tmp_path}/pid\nwait\n")
    python.chmod(0o755)
    monkeypatch.setattr(gpu_report.sys, "executable", str(python))  # type: ignore[attr-defined]
    done = gpu_report._run("-m", "tests", timeout=2)
    assert done.code is None and done.trouble == "not done in time\nsaid this"
    stat = Path(f"/proc/{(tmp_path / 'pid').read_text().strip()}/stat")
    until = time.monotonic() + 60  # it was told to end, and has to be given a core for that
    while is_running(stat):
        assert time.monotonic() < until, "it still runs"
        time.sleep(0.05)


def is_running(stat: Path) -> bool:
    """Returns whether the process of a file of the kernel's is more than an entry in a list."""
    try:
        return stat.read_text().split()[2] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


@pytest.mark.parametrize(
    ("error", "outcome", "detail"),
    [
        (KeyboardInterrupt(), "skipped", "somebody has pressed Ctrl-C"),
        (OSError("disk"), "failed", "OSError: disk"),
    ],
)
def test_what_was_found_until_then_is_written(
    error: BaseException,
    outcome: str,
    detail: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen = []

    def findings(folder: Path) -> Iterator[Finding]:
        yield good("first", "")
        seen.append(read_findings(folder / "report.md"))
        raise error

    monkeypatch.setattr(gpu_report, "all_findings", findings)
    report = gpu_report.written(tmp_path)
    assert [f.name for f in seen[0].findings] == ["first", "the rest"]
    assert seen[0].verdict.startswith("Nothing failed, but 1 skipped")
    assert report == read_findings(tmp_path / "report.md")
    assert (report.findings[-1].outcome, report.findings[-1].detail) == (outcome, detail)


GOOD_LOG = "========= COMPUTE-SANITIZER\n========= ERROR SUMMARY: 0 errors\n"
BAD_LOG = "========= Invalid __global__ read\n========= ERROR SUMMARY: 3 errors\n"
RACES = "========= RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)\n"


@pytest.mark.parametrize(
    ("texts", "outcomes"),
    [
        ([GOOD_LOG, GOOD_LOG, RACES], ["good"]),
        ([GOOD_LOG], ["failed"]),  # a rank was killed before it could say anything
        ([GOOD_LOG, BAD_LOG], ["failed", "good"]),
        ([GOOD_LOG, GOOD_LOG, "========= COMPUTE-SANITIZER\n"], ["failed", "good"]),
        ([], ["failed"]),
    ],
)
def test_every_rank_must_have_a_summary_without_errors(
    texts: list[str], outcomes: list[str]
) -> None:
    found = list(gpu_report.summaries_of("memcheck", texts, ranks=2))
    assert [finding.outcome for finding in found] == outcomes


def test_the_sanitizer_looks_at_tests_that_exist() -> None:
    text = "".join((ROOT / file).read_text() for file in gpu_report.SANITIZED_FILES)
    for name in gpu_report.SANITIZED_TESTS:
        assert f"def {name}(" in text


def test_all_workloads_get_as_many_ranks_as_there_are_gpus() -> None:
    suite = load_yaml(ROOT / "benchmarks" / "gpu.yaml")
    assert len(suite["workloads"]) == gpu_report.WORKLOADS
    assert not any("ranks" in workload.get("sweep", {}) for workload in suite["workloads"])
