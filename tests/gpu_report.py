"""Runs all that needs a GPU on the GPUs of this machine, and writes one report: ``make test-gpu``.

    python -m tests.gpu_report --output runs/gpu_report

The doctor, the tests marked ``gpu``, the kernels under compute-sanitizer, and the benchmark against
TorchRec's shardings.  What was skipped is listed with the reason, and then nothing is called all
good.  Without a GPU, and on an emulated one, it ends at once.
"""

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import torch

from fusedrec_torchrec.bench.figures import WorkloadFigures
from fusedrec_torchrec.bench.machine import describe_machine
from fusedrec_torchrec.bench.results import RESULTS
from fusedrec_torchrec.doctor.findings import (
    Finding,
    Findings,
    failed,
    good,
    read_findings,
    skipped,
)
from tests.emulated_cuda import is_emulated

ROOT = Path(__file__).parents[1]
NO_GPU = 2
SANITIZER = "compute-sanitizer"
# Memory that is not there, races in shared memory, memory that nobody has written.
TOOLS = ("memcheck", "racecheck", "initcheck")
# A small selection: under the sanitizer everything takes ten to a hundred times as long.
SANITIZED = ("tests/sharding/modules/test_gpu.py", "-k", "weighted_and_variable_batches")
SHOWN_LINES = 15


def obstacle() -> str | None:
    """Returns why nothing can be run here; None if it can."""
    if is_emulated():
        return "the GPU is emulated, which tells nothing about a real one: use make test-cuda"
    if not torch.cuda.is_available():
        return "torch finds no CUDA device; make test-cuda runs the same tests on an emulated one"
    return None


def tests_of(results: Path, name: str) -> Iterator[Finding]:
    """Yields what a run of pytest has to say, from its file of results; tests that say why."""
    if not results.is_file():
        yield failed(name, "pytest ended without results")
        return
    passed = 0
    for case in ElementTree.parse(results).getroot().iter("testcase"):
        title = f"{name}: {case.get('classname')}.{case.get('name')}"
        trouble = [*case.iter("failure"), *case.iter("error")]
        left_out = case.find("skipped")
        if trouble:
            yield failed(title, _last_lines(trouble[0].text or trouble[0].get("message") or ""))
        elif left_out is not None:
            yield skipped(title, left_out.get("message") or "no reason given")
        else:
            passed += 1
    yield good(name, f"{passed} passed") if passed else failed(name, "no test passed")


def benchmarks_of(folder: Path) -> Iterator[Finding]:
    """Yields what a benchmark has measured, and what it has left out."""
    if not (folder / RESULTS).is_file():
        yield failed("benchmark", "it ended without results")
        return
    document: dict[str, Any] = json.loads((folder / RESULTS).read_text())
    for name, reason in document["left_out"].items():
        yield skipped(f"benchmark: {name}", reason)
    for name, text in document["failed"].items():
        yield failed(f"benchmark: {name}", text)
    for result in document["results"]:
        figures = WorkloadFigures(result)
        name = f"benchmark: {result['workload']['name']}"
        for system, reason in result["measured"]["left_out"].items():
            yield skipped(f"{name}: {system}", reason)
        steps = {
            f"{system}, ms a step": round(one.milliseconds, 3)
            for system, one in figures.systems.items()
        }
        yield good(name, f"{len(steps)} systems", **steps)
    if not (document["results"] or document["failed"] or document["left_out"]):
        yield failed("benchmark", "nothing was measured")


def all_findings(folder: Path) -> Iterator[Finding]:
    """Yields the findings of everything, one run after another."""
    doctor = folder / "doctor.md"
    doctor.unlink(missing_ok=True)
    told = _run(
        "-m", "fusedrec_torchrec.cli.main", "doctor", "--device", "cuda", "--output", doctor
    )
    if doctor.is_file():
        yield from read_findings(doctor).findings
    else:
        yield failed("doctor", _last_lines(told.stdout))
    yield from _pytest("tests marked gpu", folder, ["-m", "gpu"])
    if shutil.which(SANITIZER) is None:
        yield skipped(SANITIZER, "it is not installed; it comes with the CUDA toolkit")
    else:
        for tool in TOOLS:
            command = [SANITIZER, "--tool", tool, "--target-processes", "all"]
            command += ["--error-exitcode", "7"]
            yield from _pytest(f"{SANITIZER} {tool}", folder, ["-m", "gpu", *SANITIZED], command)
    measured = folder / "bench"
    (measured / RESULTS).unlink(missing_ok=True)
    suite = ROOT / "benchmarks" / "gpu.yaml"
    ranks = 1 << (torch.cuda.device_count().bit_length() - 1)
    sizes = [f"--set=workloads.{i}.ranks={ranks}" for i in range(WORKLOADS)]
    _run(
        *("-m", "fusedrec_torchrec.cli.main", "bench", suite, "--output", measured, "--quiet"),
        *sizes,
    )
    yield from benchmarks_of(measured)
    if torch.cuda.device_count() == 1:
        yield skipped("exchange between GPUs", "there is one GPU only")
    yield skipped("several machines", "this is for one machine")


WORKLOADS = 4  # of benchmarks/gpu.yaml


def _pytest(
    name: str, folder: Path, selection: Sequence[str], prefix: Sequence[str] = ()
) -> Iterator[Finding]:
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        results = Path(scratch) / "results.xml"
        done = _run("-m", "pytest", *selection, f"--junitxml={results}", prefix=prefix)
        findings = list(tests_of(results, name))
    if done.returncode and not any(finding.outcome == "failed" for finding in findings):
        # What the sanitizer finds, or a process that was killed, is no failure of a test.
        text = f"ended with code {done.returncode}\n{_last_lines(done.stdout)}"
        findings = [f for f in findings if f.name != name] + [failed(name, text)]
    yield from findings


def _run(*arguments: object, prefix: Sequence[str] = ()) -> subprocess.CompletedProcess[str]:
    command = [*prefix, sys.executable, *map(str, arguments)]
    print("$", " ".join(command), flush=True)
    return subprocess.run(
        command,
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )


def _last_lines(text: str) -> str:
    return "\n".join(text.strip().splitlines()[-SHOWN_LINES:])


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs all of it; returns 0 only if nothing failed."""
    parser = argparse.ArgumentParser(prog="make test-gpu")
    parser.add_argument("--output", type=Path, default=Path("runs/gpu_report"))
    folder = parser.parse_args(arguments).output.resolve()
    reason = obstacle()
    if reason is not None:
        print(f"make test-gpu: {reason}", file=sys.stderr)
        return NO_GPU
    folder.mkdir(parents=True, exist_ok=True)
    report = Findings("make test-gpu", describe_machine(), list(all_findings(folder)))
    report.write(folder / "report.md")
    print(report.text())
    print(f"report to send: {folder / 'report.md'}")
    return 1 if report.has_failed else 0


if __name__ == "__main__":
    sys.exit(main())
