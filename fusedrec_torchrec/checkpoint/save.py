"""Saves a model and its optimizer so that every sharding can load it, TorchRec's own included."""

import shutil
from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.staging import BlockingAsyncStager
from torch.distributed.checkpoint.state_dict_saver import async_save, save
from torchrec.optim.keyed import KeyedOptimizer

from fusedrec_torchrec.access.hot_set import HotSet
from fusedrec_torchrec.checkpoint.codec_state import codec_state
from fusedrec_torchrec.checkpoint.load import CODEC_STATE, OPTIMIZER, WEIGHTS
from fusedrec_torchrec.checkpoint.manifest import Manifest, describe, hot_set_of
from fusedrec_torchrec.checkpoint.writer import CheckedWriter, sync_folder
from fusedrec_torchrec.core.all_ranks import (
    first_problem,
    gather_from_all_ranks,
    raise_on_all_ranks,
)
from fusedrec_torchrec.sharding.plan_conversion import plan_file_of
from fusedrec_torchrec.sharding.plan_file import PlanFile, write_plan

__all__ = ["PLAN_FILE", "SaveError", "partial_folder", "save_checkpoint", "write_checkpoint"]

PLAN_FILE = "plan.yaml"
HOT_FILE = "hot_rows.npz"
Planned = tuple[PlanFile, HotSet | None]


class SaveError(RuntimeError):
    """A checkpoint could not be saved; the same on all ranks."""


def save_checkpoint(
    path: str | Path,
    model: nn.Module,
    optimizer: KeyedOptimizer | None = None,
    step: int | None = None,
    planned: Planned | None = None,
    files: Mapping[str, str] | None = None,
    overwrite: bool = False,
) -> None:
    """Saves a checkpoint; must be called on all ranks.

    The files are those of torch.distributed.checkpoint for ``{"model": model.state_dict(),
    "optimizer": optimizer.state_dict()}``, so it can load them, and beside them ``manifest.json``.
    The folder appears when all of it is written.

    Args:
        path: folder that must not exist.
        model: in DistributedModelParallel.
        optimizer: its state is saved, too; of all parameters, or of the fused ones.
        step: steps done, for the manifest.
        planned: the plan as a file, with its hot rows; made of the model's own plan if None.
        files: contents of other files to put beside, by name.
        overwrite: whether a checkpoint that is there is replaced.

    Raises:
        ValueError: the folder exists.
        SaveError: it could not be written; nothing is left of it.
    """
    path = Path(path)
    is_first = dist.get_rank() == 0
    refused = None
    try:
        if is_first and path.exists() and not overwrite:
            refused = f"{path} exists already; overwrite=True replaces it"
    except OSError as error:
        refused = f"{path} cannot be looked at: {error}"
    raise_on_all_ranks(refused)
    partial = partial_folder(path)
    problem = None
    try:
        if is_first:
            shutil.rmtree(partial, ignore_errors=True)
        write_checkpoint(partial, model, optimizer, step, planned, files)
        if is_first:
            publish(path)
    except BaseException as error:  # torch's is not an Exception
        if isinstance(error, KeyboardInterrupt | SystemExit):
            raise
        problem = f"checkpoint {path} could not be saved: {reason(error)}"
    problem = first_problem(problem)
    if problem is not None:
        if is_first:
            shutil.rmtree(partial, ignore_errors=True)
        raise SaveError(problem)


def partial_folder(path: Path) -> Path:
    """Returns the folder in which a checkpoint is written before it gets its name."""
    return path.with_name(f".{path.name}.partial")


def publish(path: Path) -> None:
    """Gives a checkpoint its name, in place of one that was there, all at once."""
    old = path.with_name(f".{path.name}.removed")
    if path.exists():
        shutil.rmtree(old, ignore_errors=True)
        path.rename(old)
    partial_folder(path).rename(path)
    sync_folder(path.parent)
    shutil.rmtree(old, ignore_errors=True)


def reason(error: BaseException) -> str:
    """Returns the text of a rank's error, without the traceback that torch puts around it."""
    failures: dict[int, Any] = getattr(error, "failures", {})
    for rank, (inner, _) in sorted(failures.items()):
        return f"rank {rank}: {inner}"
    return str(error) or type(error).__name__


def write_checkpoint(
    folder: Path,
    model: nn.Module,
    optimizer: KeyedOptimizer | None = None,
    step: int | None = None,
    planned: Planned | None = None,
    files: Mapping[str, str] | None = None,
    process_group: dist.ProcessGroup | None = None,
    asynchronous: bool = False,
) -> Future[Any] | None:
    """Writes a checkpoint into a new folder, one file after another; see ``save_checkpoint``.

    All ranks must call it.

    Args:
        process_group: for the talk between ranks, on the CPU; needed if asynchronous.
        asynchronous: copies tensors and writes in the background.

    Returns:
        None, or if asynchronous what tells when all is written.
    """
    state: dict[str, Any] = {WEIGHTS: model.state_dict()}
    if optimizer is not None:
        state[OPTIMIZER] = optimizer.state_dict()
    own_codec_state = codec_state(model)
    if own_codec_state:
        state[CODEC_STATE] = {str(dist.get_rank()): own_codec_state}
    manifest = describe(model, state[WEIGHTS], step, WEIGHTS)
    # Tables that are not divided are on their owners only.
    for tables in gather_from_all_ranks(manifest.tables, process_group):
        manifest.tables.update(tables)
    problem = None
    if dist.get_rank() == 0:
        try:
            manifest = _begin(folder, model, manifest, planned, dict(files or {}))
        except Exception as error:  # whatever it is, other ranks must hear of it
            problem = str(error) or type(error).__name__
    raise_on_all_ranks(problem, process_group)
    writer = CheckedWriter(folder, manifest)
    if asynchronous:
        future = async_save(
            state,
            storage_writer=writer,
            process_group=process_group,
            async_stager=BlockingAsyncStager(),  # the default one cannot copy ShardedTensor
        )
        assert isinstance(future, Future)
        return future
    save(state, storage_writer=writer, process_group=process_group)
    return None


def _begin(
    path: Path,
    model: nn.Module,
    manifest: Manifest,
    planned: Planned | None,
    files: dict[str, str],
) -> Manifest:
    """Makes the folder with the files that rank 0 writes; returns the manifest with their names."""
    if path.exists() and any(path.iterdir()):
        raise ValueError("the folder is not empty")
    path.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (path / name).write_text(content)
    hot = hot_set_of(model)
    if hot is not None:
        hot.save(path / HOT_FILE)
        manifest = replace(manifest, hot_rows=HOT_FILE)
    planned = planned or _plan_of(model)
    if planned is not None:
        write_plan(path / PLAN_FILE, *planned)
        manifest = replace(manifest, plan=PLAN_FILE)
    return manifest


def _plan_of(model: nn.Module) -> Planned | None:
    """Returns the plan of a model; None if it has what a plan file has no place for."""
    plan = getattr(model, "plan", None)
    if plan is None:
        return None
    ranks = dist.get_world_size()
    device = next((p.device.type for p in model.parameters()), "cpu")
    try:
        return plan_file_of(plan, ranks, ranks, device)
    except ValueError:
        return None
