"""Runs one rank of the comparisons: ``python -m fusedrec_torchrec.doctor.rank FOLDER DEVICE``.

What it finds goes into a file of the folder, one after another, so that what was finished
before a rank hangs or dies is known.
"""

import logging
import os
import sys
import traceback
import warnings
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from fusedrec_torchrec.core.files import write_json
from fusedrec_torchrec.doctor.benchmark import BENCHMARK, timed_steps
from fusedrec_torchrec.doctor.comparison import COMPARISONS, compare

__all__ = ["main", "result_file"]


def result_file(folder: Path, rank: int) -> Path:
    """Returns the file of what a rank has found."""
    return folder / f"rank_{rank}.json"


def main(folder: Path, device_type: str) -> None:
    """Makes all comparisons as one of the ranks, and times a few steps."""
    logging.disable(logging.WARNING)
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    rank, on_cuda = int(os.environ["RANK"]), device_type == "cuda"
    device = torch.device("cuda", rank) if on_cuda else torch.device("cpu")
    if on_cuda:
        torch.cuda.set_device(device)
    dist.init_process_group(
        "nccl" if on_cuda else "gloo",
        init_method=f"file://{folder / 'store'}",
        rank=rank,
        world_size=int(os.environ["WORLD_SIZE"]),
        timeout=timedelta(seconds=120),
    )
    answers: dict[str, Any] = {}
    work: dict[str, Callable[[torch.device], dict[str, Any]]] = {
        comparison.name: partial(compare, comparison) for comparison in COMPARISONS
    }
    for name, do in {**work, BENCHMARK: timed_steps}.items():
        try:
            answers[name] = do(device)
        except Exception:
            answers[name] = {"error": traceback.format_exc()}
            write_json(result_file(folder, rank), answers)
            raise  # ranks are out of step now
        write_json(result_file(folder, rank), answers)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
