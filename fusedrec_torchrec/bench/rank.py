"""``python -m fusedrec_torchrec.bench.rank JOB``: one rank of a benchmark, see ``ranks``."""

import json
import logging
import os
import resource
import sys
import warnings
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from fusedrec_torchrec.bench.measure import measure
from fusedrec_torchrec.bench.suite import SuiteConfig, WorkloadConfig
from fusedrec_torchrec.bench.systems import build
from fusedrec_torchrec.bench.workload import Workload, open_source
from fusedrec_torchrec.config import from_mapping

__all__ = ["main"]


def main(job_file: str) -> None:
    logging.disable(logging.WARNING)  # of TorchRec, about what the suite asks for
    warnings.filterwarnings("ignore")
    job = json.loads(Path(job_file).read_text())
    suite = from_mapping(SuiteConfig, job["suite"])
    config = from_mapping(WorkloadConfig, job["workload"])
    torch.set_num_threads(suite.threads)
    rank = int(os.environ["RANK"])
    dist.init_process_group(
        "gloo",
        init_method=f"file://{job['store']}",
        rank=rank,
        world_size=config.ranks,
        timeout=timedelta(minutes=10),
    )
    source = open_source(config, job["prepared"])
    if job["alone"] is not None:
        result = _memory_of(job["alone"], suite, Workload.make(config, source, rank))
    else:

        def tick() -> None:
            if rank == 0:
                print("tick", flush=True)

        result = measure(suite, config, source, tick)
    if rank == 0:
        Path(job["result"]).write_text(json.dumps(result))
    dist.barrier()
    dist.destroy_process_group()


def _memory_of(system: str, suite: SuiteConfig, workload: Workload) -> dict[str, Any]:
    """Peak memory of a system that runs alone, beyond the libraries, on the largest rank."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    model = build(system, workload)
    for step in range(suite.warm_up + suite.steps):
        model.step(workload.batches[step % len(workload.batches)])
    peak = torch.tensor(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
    dist.all_reduce(peak, dist.ReduceOp.MAX)
    return {"peak_bytes": int(peak) * 1024}


if __name__ == "__main__":
    main(sys.argv[1])
