"""Runs one rank: ``torchrun -m fusedrec_torchrec.training --config configs/tiny.yaml``."""

import argparse
import contextlib
import ctypes
import logging
import os
import signal
import sys
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import record

from fusedrec_torchrec.access.samples import Source
from fusedrec_torchrec.checkpoint.verify import CannotReadError, verify_on_all_ranks
from fusedrec_torchrec.core.config import from_mapping, load_yaml, with_overrides
from fusedrec_torchrec.hot.options import HotOptions
from fusedrec_torchrec.training.check_sharding import check_sharding
from fusedrec_torchrec.training.config import LaunchConfig, TrainConfig
from fusedrec_torchrec.training.data.loader import split
from fusedrec_torchrec.training.loop import Training
from fusedrec_torchrec.training.network import interface_called
from fusedrec_torchrec.training.process_group import init_process_group
from fusedrec_torchrec.training.run_folder import claim, locked, refuse_damaged
from fusedrec_torchrec.training.source import hot_samples, open_source
from fusedrec_torchrec.training.summary import report

__all__ = ["add_arguments", "load_config", "main", "open_checked", "run_rank"]


T = TypeVar("T")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of a training to a command."""
    parser.add_argument("--config", required=True, help="YAML file that describes the run")
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="SECTION.KEY=VALUE",
        help="overrides one setting, may be given several times",
    )
    start = parser.add_mutually_exclusive_group()
    start.add_argument(
        "--resume",
        nargs="?",
        const="latest",
        metavar="CHECKPOINT",
        help="goes on from the run's latest checkpoint, or from the one given",
    )
    start.add_argument(
        "--overwrite", action="store_true", help="replaces a run that is in the folder"
    )
    parser.add_argument(
        "--quiet",
        action="store_true",
        help="no progress bars and nothing about single steps; errors and the summary remain",
    )


def load_config(path: str, overrides: Sequence[str]) -> TrainConfig:
    """Loads the configuration of a run.

    Raises:
        ValueError: the file is missing, or something in it is unknown or out of range.
    """
    return from_mapping(TrainConfig, with_overrides(load_yaml(path), overrides), path)


def open_checked(config: TrainConfig, ranks: int, progress: bool) -> Source:
    """Opens the data and finds what can be wrong with a run before any process group exists.

    Raises:
        ValueError: what is wrong, and with which setting.
    """
    _check_launch(config.launch)
    if config.data.lanes % ranks:
        raise ValueError(
            f"data.lanes is {config.data.lanes}, must be a multiple of the number of ranks, {ranks}"
        )
    grid = config.sharding.grid
    if grid is not None:
        all_ranks = config.launch.ranks * config.launch.nodes
        try:
            grid.groups(all_ranks)
        except ValueError as error:
            raise ValueError(f"sharding.grid: {error}") from None
    source = open_source(config, progress)
    (_, samples), (_, held_out) = split(source, config.data.held_out)
    if samples < config.data.batch_size:
        raise ValueError(
            f"{samples} training samples do not fill one batch of data.batch_size "
            f"{config.data.batch_size}"
        )
    eval_size = config.data.eval_batch_size or config.data.batch_size
    if config.data.held_out and held_out < eval_size:
        raise ValueError(
            f"{held_out} held-out samples do not fill one evaluation batch of {eval_size}: set "
            "data.held_out to more, or to 0 for none, or data.eval_batch_size to less"
        )
    check_sharding(config, source, _device_type(config.launch))
    if grid is not None and config.sharding.hot != HotOptions():
        raise ValueError(
            "sharding.hot and sharding.grid are both set: hot rows are not supported with 2D "
            "parallelism; leave out one of them"
        )
    if config.data.hot_batches.order == "separated":
        hot_samples(config, source)
    return source


def _check_launch(config: LaunchConfig) -> None:
    if config.device == "cuda" and not torch.cuda.is_available():
        raise ValueError("launch.device is cuda, but torch finds no CUDA device")
    if config.backend == "nccl" and _device_type(config) == "cpu":
        raise ValueError("launch.backend is nccl, which needs CUDA; use gloo or auto on CPU")
    if config.interface is not None:
        interface_called(config.interface)


def run_rank(
    config: TrainConfig,
    source: Source,
    resume: str | None,
    overwrite: bool,
    quiet: bool = False,
) -> None:
    """Trains as one rank of the process group that the environment describes."""
    _die_with_parent()
    device = _device(config.launch)
    backend = config.launch.backend
    if backend == "auto":
        backend = "nccl" if device.type == "cuda" else "gloo"
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

            _on_first_rank(locked_folder)
            checkpoint = _claimed(config, source, resume, overwrite, job)
            result = Training(config, source, device, checkpoint, quiet).run()
            if dist.get_rank() == 0:
                report(config, result)
    finally:
        dist.destroy_process_group()


def _claimed(
    config: TrainConfig, source: Source, resume: str | None, overwrite: bool, job: str | None
) -> Path | None:
    """Returns the checkpoint to go on from, whose files are whole; None for a new run."""
    while True:
        path, restarted = _on_first_rank(lambda: claim(config, source, resume, overwrite, job))
        if path is None or not config.checkpoint.verify:
            return path
        try:
            verify_on_all_ranks(path, required=True)
        except CannotReadError:
            raise  # it may be whole all the same; the next start may be able to read it
        except ValueError as error:
            problem = str(error)
            _on_first_rank(partial(refuse_damaged, config, path, restarted, problem))
        else:
            return path


def _on_first_rank(function: Callable[[], T]) -> T:
    """Returns on all ranks what a function returns on rank 0; what it raises there, all raise."""
    answer: list[Any] = [None, None]
    if dist.get_rank() == 0:
        try:
            answer[0] = function()
        except (ValueError, OSError) as error:
            answer[1] = str(error)
    dist.broadcast_object_list(answer)
    if answer[1] is not None:
        raise ValueError(answer[1])
    result: T = answer[0]
    return result


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


def _device_type(config: LaunchConfig) -> str:
    if config.device != "auto":
        return config.device
    return "cuda" if torch.cuda.is_available() else "cpu"


def _device(config: LaunchConfig) -> torch.device:
    if _device_type(config) == "cpu":
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
    for name, value in (("RANK", "0"), ("WORLD_SIZE", "1"), ("LOCAL_WORLD_SIZE", "1")):
        os.environ.setdefault(name, value)
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", "0")
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
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
