"""What it costs to look for equal bags where there are none: a share of a step's CPU time.

    python benchmarks/bag_dedup.py --document docs/performance_details.md

Tables that their owners pool, on two ranks, with bags that never repeat.  Times are of the CPU that
the thread of a rank has used: of the operator that finds distinct bags, told to look and told not
to, by turns, and of whole training steps.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from ranks import on_ranks, write_into

from fusedrec_torchrec.bench.suite import WorkloadConfig
from fusedrec_torchrec.bench.systems import build
from fusedrec_torchrec.bench.workload import Workload, open_source
from fusedrec_torchrec.core.config import from_mapping, to_mapping
from fusedrec_torchrec.exchange.distinct_bags import BagDedup
from fusedrec_torchrec.exchange.requested_bags import WORTH
from fusedrec_torchrec.sharding.sharding_type import FUSED_TABLE_WISE

REPEATS = 20
WORKLOADS = [
    WorkloadConfig(
        name="26 tables, batches of 1024, 10 ids", batch_size=1024, pooling=10, zipf=0.6
    ),
    WorkloadConfig(
        name="26 tables, batches of 1024, 100 ids", batch_size=1024, pooling=100, zipf=0.6
    ),
    WorkloadConfig(
        name="26 tables, batches of 8192, 10 ids", batch_size=8192, pooling=10, zipf=0.6
    ),
    WorkloadConfig(name="26 tables, batches of 128, 10 ids", batch_size=128, pooling=10, zipf=0.6),
    WorkloadConfig(
        name="400 tables, batches of 53, 10 ids", batch_size=53, tables=400, pooling=10, zipf=0.6
    ),
]


def cpu_seconds(function: Callable[[], Any]) -> float:
    """Returns the CPU time that this thread needs for a call."""
    begun = time.thread_time()
    function()
    return time.thread_time() - begun


def rank(mapping: dict[str, Any]) -> tuple[float, float]:
    """Returns the seconds of looking, and of a step, as medians on this rank."""
    config = from_mapping(WorkloadConfig, mapping)
    workload = Workload.make(config, open_source(config, None), dist.get_rank())
    system = build(FUSED_TABLE_WISE, workload, torch.device("cpu"))
    tables = len(workload.table_rows)
    dedup = BagDedup(range(tables), WORTH, torch.device("cpu"))
    looks, steps = [], []
    for number in range(REPEATS):
        batch = workload.batches[number % len(workload.batches)]
        bags = (batch.values(), batch.lengths(), None, [config.batch_size] * tables)
        looking, not_looking = (
            cpu_seconds(partial(dedup, *bags, [told] * tables)) for told in (True, False)
        )
        looks.append(looking - not_looking)
        steps.append(cpu_seconds(partial(system.step, batch)))
    warm = REPEATS // 4
    return statistics.median(looks[warm:]), statistics.median(steps[warm:])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--document", type=Path, help="document to write the table into")
    arguments = parser.parse_args()
    lines = ["| bags that never repeat | to look, ms | step, ms | share |", "|---|---|---|---|"]
    for config in WORKLOADS:
        looking, step = on_ranks(2, rank, to_mapping(config))
        lines.append(
            f"| {config.name} | {1e3 * looking:.2f} | {1e3 * step:.1f} | {looking / step:.1%} |"
        )
        print(lines[-1], flush=True)
    if arguments.document is not None:
        write_into(arguments.document, "bag dedup", "\n".join(lines))


if __name__ == "__main__":
    main()
