"""What a rank runs: ``torchrun -m fusedrec_torchrec.training --config configs/tiny.yaml``."""

import argparse
import logging
import os
import sys
import warnings
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import yaml
from torch.distributed.elastic.multiprocessing.errors import record

from fusedrec_torchrec.config import from_mapping, load_yaml, to_yaml, with_overrides
from fusedrec_torchrec.data.loader import split
from fusedrec_torchrec.data.samples import Source
from fusedrec_torchrec.training.checkpoint import find_checkpoints, read_run_state
from fusedrec_torchrec.training.config import TrainConfig
from fusedrec_torchrec.training.loop import Training
from fusedrec_torchrec.training.model import check_sharding
from fusedrec_torchrec.training.source import open_source
from fusedrec_torchrec.training.summary import report

__all__ = ["add_arguments", "check_run", "load_config", "main", "open_checked", "run_rank"]

# What may differ between a run and the run it resumes.
FREE_TO_CHANGE = {"launch", "logging", "checkpoint", "steps", "epochs", "eval_every"}
FREE_TO_CHANGE |= {"eval_batches", "sharding", "optimizer"}
FREE_DATA = {"workers", "criteo", "eval_batch_size"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
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


def load_config(path: str, overrides: Sequence[str]) -> TrainConfig:
    """
    Raises:
        ValueError: the file is missing, or something in it is unknown or out of range.
    """
    return from_mapping(TrainConfig, with_overrides(load_yaml(path), overrides), path)


def open_checked(config: TrainConfig, ranks: int, progress: bool) -> Source:
    """Opens the data and finds what can be wrong with a run before any process group exists."""
    if config.data.lanes % ranks:
        raise ValueError(
            f"data.lanes is {config.data.lanes}, must be a multiple of the number of ranks, {ranks}"
        )
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
    check_sharding(config.sharding, source)
    return source


def check_run(config: TrainConfig, resume: str | None, overwrite: bool) -> Path | None:
    """The checkpoint to go on from, None for a new run.

    Raises:
        ValueError: the folder holds another run, or there is nothing to resume, or it does not fit.
    """
    folder = config.logging.directory
    checkpoints = find_checkpoints(folder / "checkpoints")
    if resume is None:
        if (folder / "metrics.jsonl").exists() and not overwrite:
            raise ValueError(
                f"logging.directory {folder} holds a run already: use --resume to go on with it, "
                "--overwrite to replace it, or another directory"
            )
        return None
    if resume == "latest":
        if not checkpoints:
            raise ValueError(
                f"nothing to resume: {folder / 'checkpoints'} holds no complete checkpoint "
                "(checkpoint.every sets how often one is written)"
            )
        path = checkpoints[-1]
    else:
        path = Path(resume)
    _refuse_other_run(config, path)
    return path


def _refuse_other_run(config: TrainConfig, path: Path) -> None:
    now, then = yaml.safe_load(to_yaml(config)), read_run_state(path).config
    for data in (now, then):
        for key in FREE_TO_CHANGE:
            data.pop(key, None)
        for key in FREE_DATA:
            data.get("data", {}).pop(key, None)
    differing = [f"{where} is {new}, was {old}" for where, old, new in _differences(then, now, "")]
    if differing:
        raise ValueError(f"{path} is of a different run: {'; '.join(differing)}")


def _differences(then: object, now: object, where: str) -> list[tuple[str, object, object]]:
    if isinstance(then, dict) and isinstance(now, dict):
        return [
            difference
            for key in sorted({*then, *now})
            for difference in _differences(then.get(key), now.get(key), f"{where}.{key}".strip("."))
        ]
    return [] if then == now else [(where, then, now)]


def run_rank(config: TrainConfig, resume: str | None, overwrite: bool) -> None:
    """Trains as one rank of the process group that the environment describes."""
    torch.set_num_threads(config.launch.threads)
    rank, world_size = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    source = open_checked(config, world_size, progress=rank == 0)
    restarted = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0)) > 0
    if restarted and find_checkpoints(config.logging.directory / "checkpoints"):
        resume = "latest"
    checkpoint = check_run(config, resume, overwrite or restarted)
    device = _device(config)
    backend = config.launch.backend
    if backend == "auto":
        backend = "nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(
        # Checkpoints and metrics also talk through the CPU.
        f"cpu:gloo,cuda:{backend}" if device.type == "cuda" else backend,
        timeout=timedelta(seconds=config.launch.timeout_seconds),
    )
    try:
        training = Training(config, source, device, checkpoint)
        result = training.run()
        if rank == 0:
            report(config, result)
    finally:
        dist.destroy_process_group()


def _device(config: TrainConfig) -> torch.device:
    kind = config.launch.device
    if kind == "auto":
        kind = "cuda" if torch.cuda.is_available() else "cpu"
    if kind == "cpu":
        return torch.device("cpu")
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))
    torch.cuda.set_device(device)
    return device


@record
def main() -> None:
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
    try:
        config = load_config(arguments.config, arguments.set)
    except ValueError as error:
        sys.exit(f"error: {error}")
    run_rank(config, arguments.resume, arguments.overwrite)


if __name__ == "__main__":
    main()
