"""Runs one rank: ``torchrun -m fusedrec_torchrec.training --config configs/tiny.yaml``."""

import argparse
import contextlib
import ctypes
import logging
import os
import signal
import sys
import warnings
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import record

from fusedrec_torchrec.access.samples import Source
from fusedrec_torchrec.checkpoint.verify import CannotReadError, verify_on_all_ranks
from fusedrec_torchrec.core.all_ranks import on_first_rank
from fusedrec_torchrec.training.arguments import add_arguments, load_config
from fusedrec_torchrec.training.check_plan import check_plan
from fusedrec_torchrec.training.checks import open_data
from fusedrec_torchrec.training.config import LaunchConfig, TrainConfig
from fusedrec_torchrec.training.device import check_device, device_type
from fusedrec_torchrec.training.loop import Training
from fusedrec_torchrec.training.process_group import init_process_group
from fusedrec_torchrec.training.run_folder import claim, locked, refuse_damaged
from fusedrec_torchrec.training.summary import report

__all__ = ["main", "open_checked", "run_rank", "set_rank_environment"]


def open_checked(config: TrainConfig, ranks: int, progress: bool) -> Source:
    """Opens the data and finds what can be wrong with a run before any process group exists.

    Raises:
        ValueError: what is wrong, and with which setting.
    """
    source = open_data(config, ranks, progress)
    check_device(config.launch)
    check_plan(config, source, device_type(config.launch))
    return source


def run_rank(
    config: TrainConfig,
    source: Source,
    resume: str | None,
    overwrite: bool,
    quiet: bool = False,
) -> dict[str, float]:
    """Trains as one rank of the process group that the environment describes.

    A process group that is there already is used, and stays.

    Returns:
        The last evaluation, and throughput over the run.
    """
    _die_with_parent()
    device = _device(config.launch)
    backend = config.launch.backend
    if backend == "auto":
        backend = "nccl" if device.type == "cuda" else "gloo"
    own_group = not dist.is_initialized()
    if own_group:
        init_process_group(
            config.launch,
            # Checkpoints and metrics also talk through the CPU.
            f"cpu:gloo,cuda:{backend}" if device.type == "cuda" else backend,
        )
    job = _job()
    try:
        with contextlib.ExitStack() as stack:

            def locked_folder() -> None:
                stack.enter_context(locked(config.logging.directory))

            on_first_rank(locked_folder)
            checkpoint = _claimed(config, source, resume, overwrite, job)
            result = Training(config, source, device, checkpoint, quiet).run()
            if dist.get_rank() == 0:
                report(config, result)
            return result
    finally:
        if own_group:
            dist.destroy_process_group()


def set_rank_environment() -> tuple[int, int]:
    """Makes a process that nobody launched the only rank; returns rank and number of ranks."""
    for name, value in (("RANK", "0"), ("WORLD_SIZE", "1"), ("LOCAL_WORLD_SIZE", "1")):
        os.environ.setdefault(name, value)
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", "0")
    return int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])


def _claimed(
    config: TrainConfig, source: Source, resume: str | None, overwrite: bool, job: str | None
) -> Path | None:
    """Returns the checkpoint to go on from, whose files are whole; None for a new run."""
    while True:
        path, restarted = on_first_rank(lambda: claim(config, source, resume, overwrite, job))
        if path is None or not config.checkpoint.verify:
            return path
        try:
            verify_on_all_ranks(path, required=True)
        except CannotReadError:
            raise  # it may be whole all the same; the next start may be able to read it
        except ValueError as error:
            problem = str(error)
            on_first_rank(partial(refuse_damaged, config, path, restarted, problem))
        else:
            return path


def _job() -> str | None:
    """Returns the name of this job, the same if ranks are started again; None without torchrun."""
    job = os.environ.get("TORCHELASTIC_RUN_ID")
    if job != "none":
        return job
    # A static rendezvous has no name: the launcher itself is one.
    launcher = os.getppid()
    began = Path(f"/proc/{launcher}/stat")
    return f"{launcher} {began.read_text().split()[21] if began.is_file() else ''}"


def _die_with_parent() -> None:
    """Ends this rank with its launcher; it would train on alone."""
    if sys.platform == "linux" and "TORCHELASTIC_RUN_ID" in os.environ:
        PR_SET_PDEATHSIG = 1
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def _device(config: LaunchConfig) -> torch.device:
    if device_type(config) == "cpu":
        return torch.device("cpu")
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))
    torch.cuda.set_device(device)
    return device


@record
def main() -> None:
    """Trains as the rank that the environment describes, from the arguments of the command line."""
    for name in ("torchrec", "torch.fx"):
        logging.getLogger(name).setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", category=FutureWarning)  # TorchRec's use of ShardedTensor
    parser = argparse.ArgumentParser(description=__doc__)
    add_arguments(parser)
    arguments = parser.parse_args()
    rank, world_size = set_rank_environment()
    try:
        config = load_config(arguments.config, arguments.set)
        torch.set_num_threads(config.launch.threads)
        source = open_checked(config, world_size, rank == 0 and not arguments.quiet)
    except ValueError as error:
        sys.exit(f"error: {error}")
    if rank == 0 and source.left_out:
        print("\n".join(source.left_out), file=sys.stderr)
    run_rank(config, source, arguments.resume, arguments.overwrite, arguments.quiet)


if __name__ == "__main__":
    main()
