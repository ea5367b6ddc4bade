"""Runs all that needs a GPU on the GPUs of this machine, and writes one report: ``make test-gpu``.

    python -m tests.gpu_report --output runs/gpu_report

The doctor, the tests marked ``gpu``, the kernels under compute-sanitizer, and the benchmark against
TorchRec's shardings.  What was skipped is listed with the reason, and then nothing is called all
good.  Without a GPU, and on an emulated one, it ends at once.

The report is written whenever there is something new to say, so that whoever loses patience, or the
machine, has what there is until then; what is still to come stands in it as skipped.
"""

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
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
from tests.cluster import SLOWER
from tests.emulated_cuda import is_emulated

ROOT = Path(__file__).parents[1]
NO_GPU = 2
SANITIZER = "compute-sanitizer"
# Memory that is not there, races in shared memory, memory that nobody has written.
TOOLS = ("memcheck", "racecheck", "initcheck")
# A small selection: under the sanitizer everything takes ten to a hundred times as long.
SANITIZED_FILES = (
    "tests/sharding/modules/test_gpu.py",
    "tests/sharding/modules/test_owner_pooling_gpu.py",
    "tests/hot/test_gpu.py",
    "tests/grid/test_gpu.py",
)
SANITIZED_TESTS = (
    "test_weighted_and_variable_batches",
    "test_codecs_of_numbers",
    "test_weighted",  # owners that pool
    "test_kernels_update_replicas_as_torch_does",  # hot rows, also with thresholds
    "test_kernels_average_what_torch_does",  # 2D parallelism
)
SANITIZED = (*SANITIZED_FILES, "-k", " or ".join(SANITIZED_TESTS))
# So that memory is not handed on inside of torch, where the sanitizer does not see it end.
SANITIZER_SETTINGS = {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1", SLOWER: "30"}
SUMMARIES = ("ERROR SUMMARY", "RACECHECK SUMMARY")  # one of each process that has come to its end
SHOWN_LINES = 15
# Seconds, of one run of each.
DOCTOR, TESTS, SANITIZING, BENCHMARKS = 1800, 4 * 3600, 4 * 3600, 4 * 3600


def obstacle() -> str | None:
    """Returns why nothing can be run here; None if it can."""
    if is_emulated():
        return "the GPU is emulated, which tells nothing about a real one: use make test-cuda"
    if not torch.cuda.is_available():
        return "torch finds no CUDA device; make test-cuda runs the same tests on an emulated one"
    return None


@dataclass(frozen=True)
class Done:
    """How a run has ended.

    Attributes:
        code: that it has ended with; None if it was not done in time.
        text: what it has said.
    """

    code: int | None
    text: str

    @property
    def trouble(self) -> str:
        """How it has ended, and the last lines of what it has said."""
        how = "not done in time" if self.code is None else f"ended with code {self.code}"
        return f"{how}\n{_last_lines(self.text)}"


def tests_of(results: Path, name: str, done: Done) -> Iterator[Finding]:
    """Yields what a run of pytest has to say, from its file of results; tests that say why."""
    if not results.is_file():
        yield failed(name, f"pytest ended without results: {done.trouble}")
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


def benchmarks_of(folder: Path, done: Done) -> Iterator[Finding]:
    """Yields what a benchmark has measured, and what it has left out."""
    if not (folder / RESULTS).is_file():
        yield failed("benchmark", f"there are no results: {done.trouble}")
        return
    if done.code != 0:
        yield failed("benchmark", done.trouble)
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
        *("-m", "fusedrec_torchrec.cli.main", "doctor", "--device", "cuda", "--output", doctor),
        timeout=DOCTOR,
    )
    if doctor.is_file():
        yield from read_findings(doctor).findings
    if not doctor.is_file() or told.code is None:
        yield failed("doctor", told.trouble)
    yield from _pytest("tests marked gpu", folder, ["-m", "gpu"], TESTS)
    if shutil.which(SANITIZER) is None:
        yield skipped(SANITIZER, "it is not installed; it comes with the CUDA toolkit")
    else:
        for tool in TOOLS:
            yield from sanitized(tool, folder)
    measured = folder / "bench"
    (measured / RESULTS).unlink(missing_ok=True)
    suite = ROOT / "benchmarks" / "gpu.yaml"
    ranks = 1 << (torch.cuda.device_count().bit_length() - 1)
    sizes = [f"--set=workloads.{i}.ranks={ranks}" for i in range(WORKLOADS)]
    done = _run(
        *("-m", "fusedrec_torchrec.cli.main", "bench", suite, "--output", measured, "--quiet"),
        *sizes,
        timeout=BENCHMARKS,
    )
    yield from benchmarks_of(measured, done)
    if torch.cuda.device_count() == 1:
        yield skipped("exchange between GPUs", "there is one GPU only")
    yield skipped("several machines", "this is for one machine")


WORKLOADS = 4  # of benchmarks/gpu.yaml


def sanitized(tool: str, folder: Path) -> Iterator[Finding]:
    """Yields what a tool of the sanitizer finds; every rank must have come to its end under it."""
    name = f"{SANITIZER} {tool}"
    with tempfile.TemporaryDirectory(dir=folder) as logs:
        command = [SANITIZER, "--tool", tool, "--target-processes", "all"]
        command += ["--error-exitcode", "7", "--log-file", f"{logs}/%p.log"]
        # Tests wait longer, too: see SLOWER.
        selection = ["-m", "gpu", "--timeout", str(SANITIZING), *SANITIZED]
        yield from _pytest(name, folder, selection, SANITIZING, command, SANITIZER_SETTINGS)
        texts = [path.read_text(errors="replace") for path in sorted(Path(logs).iterdir())]
    yield from summaries_of(name, texts, ranks=min(2, torch.cuda.device_count()))


def summaries_of(name: str, texts: Sequence[str], ranks: int) -> Iterator[Finding]:
    """Yields what the sanitizer has said of each process."""
    lines = [
        [line for line in text.splitlines() if any(summary in line for summary in SUMMARIES)]
        for text in texts
    ]
    ended = [found[-1].strip("= ") for found in lines if found]
    for text, found in zip(texts, lines, strict=True):
        if not found or ": 0 " not in found[-1]:
            yield failed(f"{name}: a process", _last_lines(text) or "it has said nothing")
    if len(ended) < ranks:
        text = f"{len(ended)} processes have one, must be {ranks} or more"
        yield failed(f"{name}: summaries", text)
    else:
        yield good(f"{name}: summaries", "; ".join(ended))


def _pytest(
    name: str,
    folder: Path,
    selection: Sequence[str],
    timeout: float,
    prefix: Sequence[str] = (),
    settings: Mapping[str, str] | None = None,
) -> Iterator[Finding]:
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        results = Path(scratch) / "results.xml"
        command = ("-m", "pytest", *selection, f"--junitxml={results}")
        done = _run(*command, timeout=timeout, prefix=prefix, settings=settings)
        findings = list(tests_of(results, name, done))
    if done.code != 0 and not any(finding.outcome == "failed" for finding in findings):
        # What the sanitizer finds, or a process that was killed, is no failure of a test.
        findings = [f for f in findings if f.name != name] + [failed(name, done.trouble)]
    yield from findings


def _run(
    *arguments: object,
    timeout: float,
    prefix: Sequence[str] = (),
    settings: Mapping[str, str] | None = None,
) -> Done:
    """Runs Python in a group of processes of its own, all of which end with it."""
    command = [*prefix, sys.executable, *map(str, arguments)]
    print("$", " ".join(command), flush=True)
    with tempfile.TemporaryFile("w+", errors="replace") as output:
        process = subprocess.Popen(
            command,
            cwd=ROOT,
            env={**os.environ, **(settings or {})},
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        code: int | None = None
        try:
            code = process.wait(timeout)
        except subprocess.TimeoutExpired:
            pass
        finally:
            if code is None:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        output.seek(0)
        return Done(code, output.read())


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
    report = written(folder)
    print(report.text())
    print(f"report to send: {folder / 'report.md'}")
    return 1 if report.has_failed else 0


def written(folder: Path) -> Findings:
    """Returns the report of everything, which is written whenever there is something new."""
    path, machine, findings = folder / "report.md", describe_machine(), list[Finding]()
    unfinished = "it had not come to that when this was written"
    try:
        for finding in all_findings(folder):
            findings.append(finding)
            so_far = [*findings, skipped("the rest", unfinished)]
            Findings("make test-gpu", machine, so_far).write(path)
    except KeyboardInterrupt:
        findings.append(skipped("the rest", "somebody has pressed Ctrl-C"))
    except Exception as error:
        findings.append(failed("the rest", f"{type(error).__name__}: {error}"))
    report = Findings("make test-gpu", machine, findings)
    report.write(path)
    return report


if __name__ == "__main__":
    sys.exit(main())
