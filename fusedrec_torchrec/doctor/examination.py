"""Examines an installation: what is there, and whether it computes what it should."""

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from fusedrec_torchrec.bench.machine import describe_machine
from fusedrec_torchrec.bench.ranks import environment
from fusedrec_torchrec.core.device import Device
from fusedrec_torchrec.doctor.benchmark import BENCHMARK, judged
from fusedrec_torchrec.doctor.comparison import COMPARISONS, Comparison, Tolerance
from fusedrec_torchrec.doctor.findings import Finding, Findings, failed, good, skipped
from fusedrec_torchrec.doctor.installation import installation
from fusedrec_torchrec.doctor.machine import machine
from fusedrec_torchrec.doctor.rank import result_file

__all__ = ["examine", "ranks_of"]

CPU_RANKS = 2
SHOWN_LINES = 12
SETTINGS = ("FUSEDREC_", "NCCL_", "CUDA_", "TORCH_", "LD_PRELOAD", "TRITON_", "PYTORCH_")
KEPT = (
    "outputs",
    "weights",
    "collectives",
    "bytes sent",
    "waits of the host",
    "peak device memory",
)


def ranks_of(device: Device) -> int:
    """Returns how many ranks there are: one for each GPU, or two on CPU."""
    return CPU_RANKS if device == "cpu" else torch.cuda.device_count()


def examine(device: Device, timeout: float, runs: Path) -> Findings:
    """Looks at everything.

    Args:
        device: that is trained on.
        timeout: seconds after which ranks are ended.
        runs: folder that runs go to.
    """
    findings = [*installation(device), *machine(device, runs), *_computes(device, timeout)]
    described: dict[str, Any] = describe_machine()
    # Names only: values may hold paths and names of hosts.
    described["variables"] = sorted(name for name in os.environ if name.startswith(SETTINGS))
    return Findings(f"fusedrec doctor --device {device}", described, findings)


def _computes(device: Device, timeout: float) -> Iterator[Finding]:
    """Yields a finding for each comparison, and one about the exchange between GPUs."""
    ranks = ranks_of(device)
    if device == "cuda" and not ranks:
        for name in (*(comparison.name for comparison in COMPARISONS), BENCHMARK):
            yield skipped(name, "there is no GPU")
        return
    with tempfile.TemporaryDirectory() as folder:
        trouble = _run_ranks(Path(folder), device, ranks, timeout)
        answers = [_read(result_file(Path(folder), rank)) for rank in range(ranks)]
    for comparison in COMPARISONS:
        yield _judged(comparison, [one.get(comparison.name) for one in answers])
    yield _judged_benchmark([one.get(BENCHMARK) for one in answers])
    if not trouble and not all(answers):
        trouble = "they ended without an answer"
    if trouble:
        yield failed("ranks", trouble)
    elif ranks > 1:
        backend = "NCCL" if device == "cuda" else "gloo"
        yield good("ranks", f"{ranks} ranks exchanged rows with {backend}")
    else:
        yield skipped("ranks", "there is one GPU only: nothing was exchanged between GPUs")


def _judged_benchmark(answers: list[dict[str, Any] | None]) -> Finding:
    told = [answer for answer in answers if answer is not None]
    errors = [answer["error"] for answer in told if "error" in answer]
    if errors:
        return failed(BENCHMARK, _last_lines(errors[0]))
    if len(told) < len(answers):
        return skipped(
            BENCHMARK, f"{len(answers) - len(told)} of {len(answers)} ranks did not get there"
        )
    return judged(told)


def _judged(comparison: Comparison, answers: list[dict[str, Any] | None]) -> Finding:
    """Returns what the answers of all ranks to one comparison mean."""
    name = comparison.name
    told = [answer for answer in answers if answer is not None]
    errors = [answer["error"] for answer in told if "error" in answer]
    if errors:
        return failed(name, _last_lines(errors[0]))
    if len(told) < len(answers):
        missing = len(answers) - len(told)
        text = f"{missing} of {len(answers)} ranks did not get there"
        return failed(name, text) if told else skipped(name, text)
    apart = [answer[key] for answer in told for key in ("outputs", "weights")]
    worst = max(apart) if all(a == a for a in apart) else float("nan")
    figures = {key: [answer[key] for answer in told] for key in KEPT if key in told[0]}
    compared, elements = sum(answer["compared"] for answer in told), told[0]["elements"]
    if compared != elements:
        return failed(name, f"{compared} of {elements} weights are on some rank", **figures)
    text = f"largest difference {worst:.1e} of the largest number, at most {Tolerance:.0e}"
    return good(name, text, **figures) if worst <= Tolerance else failed(name, text, **figures)


def _run_ranks(folder: Path, device: Device, ranks: int, timeout: float) -> str:
    """Runs all ranks to their end; returns what went wrong, nothing if nothing did."""
    processes: list[subprocess.Popen[bytes]] = []
    try:
        for rank in range(ranks):
            with (folder / f"rank_{rank}.err").open("wb") as errors:
                processes.append(
                    subprocess.Popen(
                        [sys.executable, "-m", "fusedrec_torchrec.doctor.rank", folder, device],
                        env=environment(rank, ranks, 1, "lo"),
                        stdout=errors,
                        stderr=errors,
                    )
                )
        end = time.monotonic() + timeout
        while any(process.poll() is None for process in processes):
            broken = [rank for rank, process in enumerate(processes) if process.poll()]
            if broken:
                text = (folder / f"rank_{broken[0]}.err").read_text(errors="replace")
                code = processes[broken[0]].returncode
                return f"rank {broken[0]} ended with code {code}\n{_last_lines(text)}"
            if time.monotonic() > end:
                return f"not done after {timeout:g} seconds"
            time.sleep(0.05)
        codes = [process.returncode for process in processes]
        if any(codes):
            rank = next(rank for rank, code in enumerate(codes) if code)
            text = (folder / f"rank_{rank}.err").read_text(errors="replace")
            return f"rank {rank} ended with code {codes[rank]}\n{_last_lines(text)}"
        return ""
    finally:
        for process in processes:
            process.kill()
            process.wait()


def _read(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text()) if path.is_file() else {}


def _last_lines(text: str) -> str:
    return "\n".join(text.strip().splitlines()[-SHOWN_LINES:])
