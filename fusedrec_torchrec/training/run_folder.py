"""Decides who may write into the folder of a run, and where the run goes on."""

import contextlib
import fcntl
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from fusedrec_torchrec.access.samples import Source
from fusedrec_torchrec.core.config import to_mapping
from fusedrec_torchrec.core.files import described
from fusedrec_torchrec.training.config import TrainConfig
from fusedrec_torchrec.training.run_state import find_checkpoints, read_run_state

__all__ = ["check_run", "claim", "locked", "refuse_damaged"]

JOB = ".job"
# What may differ between a run and the run it resumes.
FREE_TO_CHANGE = {
    *(
        "launch",
        "logging",
        "checkpoint",
        "bad_batches",
        "steps",
        "epochs",
        "eval_every",
        "eval_batches",
    ),
    *("data.workers", "data.criteo", "data.table", "data.eval_batch_size"),
    *("sharding.type", "sharding.tables", "sharding.exchange.input_dist"),
    *("sharding.exchange.extra_features", "sharding.exchange.capacity_slack"),
    *("sharding.exchange.codecs", "sharding.exchange.table_codecs"),
    *("sharding.dense_gradients", "sharding.grid", "sharding.hot", "plan"),
    *("optimizer.embedding.learning_rate", "optimizer.embedding.eps"),
    "optimizer.embedding.momentum_scale",
    *("optimizer.dense.learning_rate", "optimizer.schedule"),
}


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Keeps a second training out of the folder while this one runs.

    Raises:
        ValueError: the folder cannot be written, or another training has it.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        file = (folder / ".lock").open("w")
    except OSError as error:
        raise ValueError(
            f"logging.directory {folder} cannot be written: {described(error)}"
        ) from None
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ValueError(
                f"logging.directory {folder} is in use by another training that is still running"
            ) from None
        except OSError:
            pass  # a file system without locks
        yield


def claim(
    config: TrainConfig, source: Source, resume: str | None, overwrite: bool, job: str | None
) -> tuple[Path | None, bool]:
    """Makes the folder this job's, and finds the checkpoint to go on from.

    Returns:
        The checkpoint to go on from, None for a new run; and whether ranks were started again.

    Ranks that are started again under the same ``job`` go on from the latest checkpoint, whatever
    the command line says: it was obeyed when the job began.
    """
    folder = config.logging.directory
    marker = folder / JOB
    again = job is not None and marker.is_file() and marker.read_text() == job
    if again:
        checkpoints = find_checkpoints(folder / "checkpoints")
        path = checkpoints[-1] if checkpoints else None
        set_aside = [*(folder / "checkpoints").glob("damaged_*")]
        if path is None and set_aside:
            raise ValueError(
                f"{folder / 'checkpoints'} has no checkpoint left that can be used; set aside as "
                f"damaged: {', '.join(sorted(p.name for p in set_aside))}. --overwrite begins anew"
            )
        if path is None and resume not in (None, "latest"):
            path = Path(str(resume))  # of another folder: nothing was saved here yet
    else:
        path = check_run(config, source, resume, overwrite)
    if path is None:
        _clear(folder)
    elif path.parent.resolve() == (folder / "checkpoints").resolve():
        _set_aside_after(path)
    if job is not None:
        marker.write_text(job)
    return path, again


def refuse_damaged(config: TrainConfig, path: Path, restarted: bool, problem: str) -> None:
    """Sets a damaged checkpoint aside, or refuses to go on.

    Ranks that were started again go on from the one before it, if there is one: it is set aside.
    A person who wants to resume may want to know.

    Raises:
        ValueError: with the one before it, if there is one.
    """
    folder = config.logging.directory / "checkpoints"
    before = [p for p in find_checkpoints(folder) if p != path]
    if restarted and before and path.parent.resolve() == folder.resolve():
        target = path.with_name(f"damaged_{path.name}")
        shutil.rmtree(target, ignore_errors=True)
        path.rename(target)
        print(f"warning: {problem}; going on from {before[-1]}", file=sys.stderr, flush=True)
        return
    raise ValueError(problem + offer_before(path))


def offer_before(path: Path) -> str:
    """Returns a hint at the checkpoint before one that cannot be used, if there is one."""
    earlier = [p for p in find_checkpoints(path.parent) if p.name < path.name]
    return f". The one before it: --resume {earlier[-1]}" if earlier else ""


def check_run(
    config: TrainConfig, source: Source, resume: str | None, overwrite: bool
) -> Path | None:
    """Returns the checkpoint that ``claim`` will find, without changing anything.

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
    _refuse_other_run(config, source, path)
    return path


def _refuse_other_run(config: TrainConfig, source: Source, path: Path) -> None:
    try:
        state = read_run_state(path)
    except ValueError as error:
        raise ValueError(f"{error}{offer_before(path)}") from None
    now = to_mapping(config)
    free_to_change = FREE_TO_CHANGE
    if config.data.hot_batches.order != "mixed":  # the hot set decides on the order of samples
        free_to_change = FREE_TO_CHANGE - {"sharding.hot"} | {"sharding.hot.codec"}
    differing = [
        f"{where} is {new}, was {old}"
        for where, old, new in _differences(state.config, now, "")
        if not any(where == free or where.startswith(f"{free}.") for free in free_to_change)
    ]
    if state.data != source.identity:
        differing.append("the data is not that of the checkpoint")
    if differing:
        raise ValueError(f"{path} is of a different run: {'; '.join(differing)}")


def _differences(then: Any, now: Any, where: str) -> list[tuple[str, object, object]]:
    if isinstance(then, dict) and isinstance(now, dict):
        return [
            difference
            for key in sorted({*then, *now})
            for difference in _differences(then.get(key), now.get(key), f"{where}.{key}".strip("."))
        ]
    return [] if then == now else [(where, then, now)]


def _clear(folder: Path) -> None:
    """Removes what an earlier run left."""
    for name in ("checkpoints", "tensorboard"):
        shutil.rmtree(folder / name, ignore_errors=True)
    for name in ("metrics.jsonl", "summary.json", "curves.png"):
        (folder / name).unlink(missing_ok=True)


def _set_aside_after(path: Path) -> None:
    """Renames later checkpoints: they belong to a branch that is left, and are not the latest."""
    for later in find_checkpoints(path.parent):
        if int(later.name[5:]) > int(path.name[5:]):
            target = later.with_name(f"abandoned_{later.name}")
            shutil.rmtree(target, ignore_errors=True)
            later.rename(target)
