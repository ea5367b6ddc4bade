"""The peak that benchmarks report is that of steps, not of what made them ready."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from fusedrec_torchrec.bench.allocators import Allocator, allocator_environment
from fusedrec_torchrec.bench.suite import SuiteConfig, WorkloadConfig
from fusedrec_torchrec.core.config import to_mapping

MB = 1 << 20
PROFILE_MB = 300
RANK = f"""
import json, sys
import numpy as np
from fusedrec_torchrec.bench.rank import Rank
from fusedrec_torchrec.bench.workload import Workload

made = Workload.profile

def large_profile(workload):
    pieces = [np.ones(1 << 14) for _ in range({PROFILE_MB} * 8)]
    assert len(pieces)
    return made(workload)

Workload.profile = large_profile
print(Rank(json.load(open(sys.argv[1]))).memory())
"""


@pytest.mark.parametrize("allocator", ["default", "keep"])
def test_the_making_of_a_profile_is_not_counted(tmp_path: Path, allocator: Allocator) -> None:
    workload = WorkloadConfig(
        name="tiny", ranks=1, batch_size=64, tables=3, rows=50, dims=[8], pooling=2
    )
    suite = SuiteConfig(pairs=5, steps=1, warm_up=2, workloads=[workload])
    job = {
        "system": "fused_profiled",
        "suite": to_mapping(suite),
        "workload": to_mapping(workload),
        "prepared": None,
        "store": str(tmp_path / "store"),
    }
    file = tmp_path / "job.json"
    file.write_text(json.dumps(job))
    ranks = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}
    done = subprocess.run(
        [sys.executable, "-c", RANK, str(file)],
        env=allocator_environment(allocator, {**os.environ, **ranks}),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert int(done.stdout.splitlines()[-1]) < PROFILE_MB / 2 * MB
