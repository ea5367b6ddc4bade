"""Runs a suite from start to end, and keeps the measurements as one JSON document."""

import sys
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from fusedrec_torchrec.bench.allocators import missing_allocator
from fusedrec_torchrec.bench.links import unavailable
from fusedrec_torchrec.bench.machine import describe_machine
from fusedrec_torchrec.bench.measure import measure
from fusedrec_torchrec.bench.ranks import RankError
from fusedrec_torchrec.bench.results import RESULTS, VERSION
from fusedrec_torchrec.bench.suite import DataName, SuiteConfig, WorkloadConfig
from fusedrec_torchrec.bench.workload import NEEDS
from fusedrec_torchrec.core.config import to_mapping
from fusedrec_torchrec.core.files import write_json

__all__ = ["run_suite"]


def run_suite(
    suite: SuiteConfig,
    prepared: Mapping[DataName, str],
    folder: Path,
    only: str | None = None,
    progress: bool = True,
) -> dict[str, Any]:
    """Measures all workloads of a suite; the file grows with every workload.

    Args:
        suite: what to measure.
        prepared: folders of prepared data; workloads on other data are left out.
        folder: where the results go.
        only: text that the names of the workloads to run contain.
        progress: whether to show a bar.
    """
    workloads = suite.chosen(only)
    document: dict[str, Any] = {
        "version": VERSION,
        "machine": describe_machine(),
        "suite": to_mapping(suite),
        "left_out": {},
        "failed": {},
        "results": [],
    }
    folder.mkdir(parents=True, exist_ok=True)
    runs = [(workload, allocator) for workload in workloads for allocator in suite.allocators]
    total = sum(len(workload.systems) for workload, _ in runs) * suite.pairs
    with tqdm(total=total, disable=not progress, file=sys.stderr, unit="measurement") as bar:
        for workload, allocator in runs:
            name = workload.name if len(suite.allocators) == 1 else f"{workload.name}, {allocator}"
            bar.set_description(name)
            done = bar.n
            reason = _obstacle(suite, workload, set(prepared)) or missing_allocator(allocator)
            if reason is not None:
                document["left_out"][name] = reason
            else:
                try:
                    data = prepared.get(workload.data)
                    measured = measure(suite, workload, data, bar.update, allocator)
                except RankError as error:
                    document["failed"][name] = str(error)
                else:
                    document["results"].append(
                        {
                            "workload": to_mapping(workload),
                            "allocator": allocator,
                            "measured": measured,
                        }
                    )
            bar.update(done + len(workload.systems) * suite.pairs - bar.n)
            write_json(folder / RESULTS, document)
    return document


def _obstacle(
    suite: SuiteConfig, workload: WorkloadConfig, prepared: Collection[DataName]
) -> str | None:
    """Returns why a workload cannot be run here; None if it can."""
    if workload.data != "zipf" and workload.data not in prepared:
        return NEEDS[workload.data]
    if suite.device == "cuda":
        gpus = torch.cuda.device_count()
        if workload.ranks > gpus:
            return f"needs {workload.ranks} GPUs, there are {gpus}"
        if workload.link:
            return f"link {workload.link} is emulated for gloo only, device is cuda"
    return unavailable(workload.link)
