"""Compares the files of a checkpoint with the checksums that were written."""

import hashlib
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch.distributed as dist

from fusedrec_torchrec.checkpoint.file_names import MANIFEST, check_is_checkpoint
from fusedrec_torchrec.checkpoint.manifest import Manifest, read_manifest
from fusedrec_torchrec.checkpoint.reader import CheckpointReader
from fusedrec_torchrec.core.all_ranks import first_problem, gather_from_all_ranks
from fusedrec_torchrec.core.folder_files import open_in_folder

__all__ = ["CannotReadError", "check_file", "checksum", "verify", "verify_on_all_ranks"]


class CannotReadError(ValueError):
    """A file of a checkpoint cannot be read just now; that says nothing of what is in it."""


def checksum(path: Path) -> dict[str, Any]:
    """Returns size and SHA-256 of a file of a checkpoint."""
    with open_in_folder(path.parent, path.name) as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
        return {"bytes": os.fstat(file.fileno()).st_size, "sha256": digest}


def check_file(folder: Path, name: str, wanted: dict[str, Any]) -> str | None:
    """Returns what is wrong with a file; None if nothing is.

    Raises:
        CannotReadError: it is there, but reading fails.
    """
    try:
        with open_in_folder(folder, name) as file:
            size = os.fstat(file.fileno()).st_size
        if size != wanted["bytes"]:
            return f"{name} has {size} bytes, must have {wanted['bytes']}"
        if checksum(folder / name) != wanted:
            return f"{name} is damaged: its SHA-256 is not that of the manifest"
    except FileNotFoundError:
        return f"{name} is missing"
    except OSError as error:
        raise CannotReadError(f"{name} cannot be read: {error}") from None
    except ValueError as error:  # it is no file of the folder
        return str(error)
    return None


def verify(
    folder: Path, progress: Callable[[Sequence[str]], Sequence[str]] | None = None
) -> list[str]:
    """Returns all that is wrong with a checkpoint; an empty list if nothing is.

    Args:
        folder: of the checkpoint.
        progress: wraps the list of files, to show how far it is.

    Raises:
        ValueError: there is no checkpoint.
    """
    problems: list[str] = []
    check_is_checkpoint(folder)
    try:
        manifest = read_manifest(folder)
        reader = CheckpointReader(folder)
        reader.metadata  # noqa: B018 - read here
    except ValueError as error:
        return [str(error)]
    names = list(manifest.files if manifest is not None else _stored_files(reader))
    for name in progress(names) if progress else names:
        if manifest is not None:
            try:
                problem = check_file(folder, name, manifest.files[name])
            except CannotReadError as error:
                problem = str(error)
        else:
            problem = None if (folder / name).is_file() else f"{name} is missing"
        if problem is not None:
            problems.append(problem + _contents(reader, name))
    if not problems:
        problems += _unreadable(reader)
    if manifest is not None:
        problems += _unlisted(manifest, reader)
    return problems


def _stored_files(reader: CheckpointReader) -> list[str]:
    return sorted({info.relative_path for info in reader.metadata.storage_data.values()})


def _contents(reader: CheckpointReader, file: str) -> str:
    """Returns which tensors a file has, for a message."""
    names = sorted(
        {
            index.fqn
            for index, info in reader.metadata.storage_data.items()
            if info.relative_path == file
        }
    )
    if not names:
        return ""
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return f" (it holds {', '.join(names[:3])}{more})"


def _unreadable(reader: CheckpointReader) -> list[str]:
    """Returns which tensors are not whole, or are not where the metadata says."""
    problems = []
    for name, about in reader.tensors.items():
        stored = sum(chunk.sizes.numel() for chunk in about.chunks)
        if stored < about.size.numel():
            problems.append(f"{name} has {stored} of {about.size.numel()} elements")
            continue
        for chunk in about.chunks:
            try:
                reader.check(name, chunk)
            except ValueError as error:
                problems.append(str(error))
    try:
        reader.check_sizes()
    except ValueError as error:
        problems.append(str(error))
    return problems


def _unlisted(manifest: Manifest, reader: CheckpointReader) -> list[str]:
    missing = sorted(set(_stored_files(reader)) - set(manifest.files))
    return [f"{name} is not in the manifest" for name in missing]


def verify_on_all_ranks(folder: Path, required: bool = False) -> None:
    """Compares checksums, each rank those of some files; must be called on all ranks.

    A checkpoint without a manifest has none to compare, unless it must have one.

    Raises:
        CannotReadError: files cannot be read just now; on all ranks.
        ValueError: the checkpoint is damaged; on all ranks.
    """
    ranks = dist.get_world_size() if dist.is_initialized() else 1
    rank = dist.get_rank() if dist.is_initialized() else 0
    problems: list[str] = []
    unread: str | None = None
    try:
        manifest = read_manifest(folder)
        if manifest is not None:
            for name in sorted(manifest.files)[rank::ranks]:
                problem = check_file(folder, name, manifest.files[name])
                if problem is not None:
                    problems.append(problem)
        elif required:
            problems.append(f"{MANIFEST} is missing")
    except CannotReadError as error:
        unread = str(error)
    except Exception as error:  # whatever it is, other ranks must hear of it
        problems.append(str(error) or type(error).__name__)
    unread = first_problem(unread)
    problems = sorted({text for on_rank in gather_from_all_ranks(problems) for text in on_rank})
    if problems:
        raise ValueError(f"{folder} is damaged: {'; '.join(problems)}")
    if unread is not None:
        raise CannotReadError(f"{folder}: {unread}")
