"""Trains on data of a Python program: its own batches, or a table in memory."""

import sys
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from fusedrec_torchrec.access.samples import Source
from fusedrec_torchrec.core.config import from_mapping, load_yaml
from fusedrec_torchrec.training.check_plan import check_plan
from fusedrec_torchrec.training.checks import check_data, check_settings
from fusedrec_torchrec.training.config import TrainConfig
from fusedrec_torchrec.training.data.data_config import copies_of
from fusedrec_torchrec.training.data.frames import is_frame, write_frame
from fusedrec_torchrec.training.data.own_batches import OwnBatch, OwnBatches
from fusedrec_torchrec.training.data.prepare import prepare_table
from fusedrec_torchrec.training.data.spelling import as_setting
from fusedrec_torchrec.training.data.table_options import SplitOptions
from fusedrec_torchrec.training.device import check_device, device_type
from fusedrec_torchrec.training.main import run_rank, set_rank_environment
from fusedrec_torchrec.training.source import open_source, prepared_folder

__all__ = ["train"]


def train(
    data: Iterable[OwnBatch] | Any | None,
    config: TrainConfig | Mapping[str, Any] | str | Path,
    *,
    eval_data: Iterable[OwnBatch] | Any | None = None,
    features: Mapping[str, str] | None = None,
    resume: str | None = None,
    overwrite: bool = False,
    quiet: bool = False,
) -> dict[str, float]:
    """Trains a model, as this rank; a program that torchrun did not start is the only one.

    Args:
        data: an iterable of batches (dense, KeyedJaggedTensor, labels), this rank's share of them,
            with ``data.source: python`` in the configuration, whose ``tables`` says what they are
            ids of; or a table (Polars, pandas, pyarrow, Hugging Face datasets), the same on all
            ranks, with ``data.table`` in the configuration, which says what its columns are; or
            None for the data that the configuration names.
        config: the run, as an object, as plain data or as a file.
        eval_data: of the same kind as ``data``, to evaluate on.
        features: own batches: the table of each feature, where features share tables or have other
            names than their tables.
        resume: ``"latest"``, or a checkpoint to go on from.
        overwrite: replaces a run that is in the folder.
        quiet: no progress bars and nothing about single steps.

    Returns:
        The last evaluation, and throughput over the run.

    Raises:
        ValueError: what is wrong with configuration or data.
    """
    if isinstance(config, str | Path):
        config = from_mapping(TrainConfig, load_yaml(config), str(config))
    elif not isinstance(config, TrainConfig):
        config = from_mapping(TrainConfig, config)
    if dist.is_initialized():
        rank, ranks = dist.get_rank(), dist.get_world_size()
    else:
        rank, ranks = set_rank_environment()
    # Whoever has started this program has said how many ranks there are.
    config = replace(config, launch=replace(config.launch, ranks=ranks, nodes=1, min_nodes=None))
    torch.set_num_threads(config.launch.threads)
    progress = rank == 0 and not quiet
    source: Source
    if data is None or is_frame(data):
        check_settings(config, ranks)
        source = _opened(data, eval_data, config, progress)
    else:
        source = _own_batches(data, eval_data, config, features)
        config = replace(
            config, data=replace(config.data, batch_size=source.batch_size * ranks, lanes=ranks)
        )
        check_settings(config, ranks)
    check_data(config, source)
    check_device(config.launch)
    check_plan(config, source, device_type(config.launch))
    if rank == 0 and source.left_out:
        print("\n".join(source.left_out), file=sys.stderr)
    return run_rank(config, source, resume, overwrite, quiet)


def _own_batches(
    data: Any, eval_data: Any, config: TrainConfig, features: Mapping[str, str] | None
) -> OwnBatches:
    if config.data.source != "python":
        raise ValueError(
            f"data gives batches, but data.source is {config.data.source}, must be python"
        )
    rows = {name: table.rows for table in config.tables for name in copies_of(table)}
    if config.steps is None and not hasattr(data, "__len__"):
        raise ValueError("steps is missing, must be there where data does not know its length")
    if eval_data is not None and config.eval_batches is None and not hasattr(eval_data, "__len__"):
        raise ValueError(
            "eval_batches is missing, must be there where eval_data does not know its length"
        )
    return OwnBatches(data, eval_data, rows, features or {name: name for name in rows})


def _opened(data: Any, eval_data: Any, config: TrainConfig, progress: bool) -> Source:
    """Opens the data that the configuration names, or a table.

    Tables are written to files, which are gone when they are prepared.
    """
    if data is None:
        return open_source(config, progress)
    table = config.data.table
    if table is None:
        raise ValueError(
            f"data is a {type(data).__name__}, but data.table is missing, must say what its "
            "columns are"
        )
    if table.files:
        raise ValueError(
            f"data.table.files is {table.files}, must be left out where a table is passed"
        )
    if eval_data is not None and table.split.by != "end":
        raise ValueError(
            f"data.table.split.by is {table.split.by}, must be left out where eval_data is passed"
        )
    with tempfile.TemporaryDirectory() as folder:
        files = [Path(folder) / "train.parquet"]
        write_frame(data, files[0])
        if eval_data is not None:
            files.append(Path(folder) / "eval.parquet")
            write_frame(eval_data, files[1])
            table = replace(table, split=SplitOptions(by="file", files=[str(files[1])]))
        table = replace(table, files=[str(file) for file in files], format="parquet")
        spelling = as_setting("data.table")
        return prepare_table(table, prepared_folder(config), progress, spelling)
