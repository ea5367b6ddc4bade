"""The actions of ``fusedrec checkpoint``, which need torch; ``checkpoint`` has their arguments."""

import shutil
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tqdm import tqdm

from fusedrec_torchrec.checkpoint.contents import Contents
from fusedrec_torchrec.checkpoint.convert import convert, plan_for
from fusedrec_torchrec.checkpoint.export import export_table
from fusedrec_torchrec.checkpoint.verify import verify
from fusedrec_torchrec.cli.json_output import print_json
from fusedrec_torchrec.core.terminal import human_bytes, print_table
from fusedrec_torchrec.sharding.plan_file import PlanFile
from fusedrec_torchrec.sharding.sharding_type import FUSED, FUSED_TYPES
from fusedrec_torchrec.training.run_state import RUN_STATE, find_checkpoints, read_run_state

__all__ = [
    "checkpoint_figures",
    "convert_checkpoint",
    "export_checkpoint",
    "show_checkpoint",
    "verify_checkpoint",
]

DAMAGED = 1


def checkpoint_figures(path: Path) -> dict[str, Any]:
    """Returns what a checkpoint holds, for programs.

    Raises:
        ValueError: it is damaged.
    """
    contents = Contents(path)
    manifest = contents.manifest
    return {
        "path": str(path),
        "step": None if manifest is None else manifest.step,
        "world_size": None if manifest is None else manifest.world_size,
        "tables": {
            table.name: {
                "weight": table.weight,
                "rows": table.rows,
                "columns": table.columns,
                "dtype": str(table.dtype).removeprefix("torch."),
                "shards": table.shards,
                "sharding": contents.sharding(table),
                "optimizer": table.states,
            }
            for table in contents.tables.values()
        },
        "others": contents.others,
        "objects": list(contents.reader.objects),
    }


def show_checkpoint(path: Path) -> None:
    """Prints what a checkpoint holds.

    Raises:
        ValueError: it is damaged.
    """
    contents = Contents(path)
    manifest = contents.manifest
    about: list[tuple[str, object]] = []
    if (path / RUN_STATE).is_file():
        state = read_run_state(path)
        about += [("step", state.step), ("written by", f"{state.world_size} ranks")]
    elif manifest is not None:
        about += [
            ("step", "unknown" if manifest.step is None else manifest.step),
            ("written by", f"{manifest.world_size} ranks"),
        ]
    files = [file for file in path.rglob("*") if file.is_file()]
    about.append(("on disk", human_bytes(sum(file.stat().st_size for file in files))))
    if manifest is None:
        about.append(("manifest", "none: written by torch.distributed.checkpoint alone"))
    else:
        about.append(("checksums", f"of {len(manifest.files)} files"))
        for name, version in manifest.made_by.items():
            about.append((name, version))
    print_table(f"checkpoint {path}", ("", ""), about)
    rows = []
    for table in contents.tables.values():
        entry = contents.entry(table)
        seed = None if entry is None else entry.hash_seed
        rows.append(
            (
                table.name,
                f"{table.rows:,} x {table.columns}",
                str(table.dtype).removeprefix("torch."),
                human_bytes(table.bytes),
                contents.sharding(table),
                table.shards,
                ", ".join(table.states),
                "" if seed is None else f"hashed, seed {seed}",
                entry.hot_rows or "" if entry is not None else "",
            )
        )
    print_table(
        "tables",
        ("table", "rows", "type", "size", "sharding", "shards", "optimizer", "ids", "hot rows"),
        rows,
    )
    others = [(name, contents.reader.tensors[name]) for name in contents.others]
    size = sum(t.size.numel() * t.properties.dtype.itemsize for _, t in others)
    numbers = sum(t.size.numel() for _, t in others)
    print(f"{len(others)} other tensors: {numbers:,} numbers, {human_bytes(size)}")


def verify_checkpoint(path: Path, quiet: bool, as_json: bool) -> int:
    """Compares all files with their checksums, prints the answer and returns the exit code."""
    problems = _problems(path, quiet)
    manifest = None if problems else Contents(path).manifest
    if as_json:
        print_json(
            {
                "path": path,
                "whole": not problems,
                "problems": problems,
                "files_compared": 0 if manifest is None else len(manifest.files),
                "before": _checkpoint_before(path),
            }
        )
        return DAMAGED if problems else 0
    for problem in problems:
        print(problem)
    if problems:
        print(f"{path}: damaged{_before(path)}")
        return DAMAGED
    if manifest is None:
        print(f"{path}: readable; there are no checksums to compare")
    else:
        print(f"{path}: {len(manifest.files)} files are what was written")
    return 0


def convert_checkpoint(
    path: Path,
    target: Path,
    *,
    world_size: int | None,
    plan: PlanFile | None,
    sharding: str,
    tables: Mapping[str, str],
    is_verified: bool,
    quiet: bool,
) -> None:
    """Writes a checkpoint as another sharding on another number of ranks would have.

    Args:
        path: of the checkpoint.
        target: a new folder.
        world_size: ranks; as many as wrote it if None.
        plan: has ranks and shardings; None if the arguments beside it say them.
        sharding: of all tables.
        tables: shardings of single tables, by name.
        is_verified: whether checksums are compared first.
        quiet: whether there is no progress bar.

    Raises:
        ValueError: the checkpoint is damaged, or the plan does not fit.
    """
    contents = _checked(path, is_verified, quiet)
    if plan is None:
        manifest = contents.manifest
        ranks = 1 if manifest is None else manifest.world_size
        plan = plan_for(contents, ranks if world_size is None else world_size, sharding, tables)
    _warn_of_hashing(contents, plan)
    size = sum(
        about.size.numel() * about.properties.dtype.itemsize
        for about in contents.reader.tensors.values()
    )
    with tqdm(total=size, unit="B", unit_scale=True, disable=quiet or None, file=sys.stderr) as bar:
        convert(contents, target, plan, bar.update)
    print(f"{target}: {len(contents.tables)} tables for {plan.ranks} ranks")


def export_checkpoint(
    path: Path,
    output: Path,
    form: str,
    *,
    tables: str | None,
    with_optimizer: bool,
    is_verified: bool,
    quiet: bool,
) -> None:
    """Writes tables in a format for serving, a file for each.

    Args:
        path: of the checkpoint.
        output: the folder to write to.
        form: one of ``FORMATS``.
        tables: names with commas between; all tables if None.
        with_optimizer: whether optimizer states are written, too.
        is_verified: whether checksums are compared first.
        quiet: whether there is no progress bar.

    Raises:
        ValueError: the checkpoint is damaged, has no such table, or the disk no room.
    """
    contents = _checked(path, is_verified, quiet)
    names = list(contents.tables)
    if tables is not None:
        names = [name.strip() for name in tables.split(",")]
        for name in names:
            if name not in contents.tables:
                raise ValueError(
                    f"--tables names {name!r}, which is no table; there are "
                    f"{', '.join(contents.tables)}"
                )
    need = sum(contents.tables[name].bytes for name in names)
    output.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(output).free
    if form == "safetensors" and need > free:
        raise ValueError(
            f"{output} has {human_bytes(free)} left, the tables need {human_bytes(need)}"
        )
    for name in tqdm(names, unit="table", disable=quiet or None):
        export_table(contents, contents.tables[name], output, form, with_optimizer)
    print(f"{output}: {len(names)} tables as {form}")


def _problems(path: Path, quiet: bool) -> list[str]:
    return verify(path, lambda names: tqdm(names, unit="file", disable=quiet or None))


def _checkpoint_before(path: Path) -> Path | None:
    """Returns the checkpoint before this one, if there is one."""
    earlier = [p for p in find_checkpoints(path.parent) if p.name < path.name]
    return earlier[-1] if earlier else None


def _before(path: Path) -> str:
    """Returns words about the checkpoint before this one, if there is one."""
    before = _checkpoint_before(path)
    return "" if before is None else f"; the one before it is {before}"


def _checked(path: Path, is_verified: bool, quiet: bool) -> Contents:
    if is_verified:
        problems = _problems(path, quiet)
        if problems:
            raise ValueError(f"{path} is damaged: {'; '.join(problems)}{_before(path)}")
    return Contents(path)


def _warn_of_hashing(contents: Contents, plan: PlanFile) -> None:
    """Warns of hashed ids where a stock sharding will take ids for rows."""
    for name, table in contents.tables.items():
        entry = contents.entry(table)
        sharding = plan.tables[name].sharding if name in plan.tables else FUSED
        if entry is not None and entry.hash_seed is not None and sharding not in FUSED_TYPES:
            print(
                f"warning: ids of table {name!r} were hashed with hash_seed {entry.hash_seed}, "
                f"which TorchRec's {sharding} does not do: its rows would be those of other ids "
                "unless you hash them yourself (fusedrec_torchrec.exchange.hashing)",
                file=sys.stderr,
            )
