"""``fusedrec checkpoint``: what is in a checkpoint, whether it is whole, other forms of it."""

import argparse
import json
import shutil
import sys
from pathlib import Path
from typing import Any

from tqdm import tqdm

from fusedrec_torchrec.checkpoint.contents import Contents
from fusedrec_torchrec.checkpoint.convert import SHARDINGS, convert, plan_for
from fusedrec_torchrec.checkpoint.export import FORMATS, export_table
from fusedrec_torchrec.checkpoint.verify import verify
from fusedrec_torchrec.core.terminal import human_bytes, print_table
from fusedrec_torchrec.sharding.plan_file import PlanFile, read_plan
from fusedrec_torchrec.sharding.sharding_type import FUSED
from fusedrec_torchrec.training.checkpoint import RUN_STATE, find_checkpoints, read_run_state

__all__ = ["add_command", "show_checkpoint"]

DAMAGED = 1


def add_command(commands: Any) -> None:
    parser = commands.add_parser(
        "checkpoint",
        help="show, verify, convert or export a checkpoint",
        description="Works on checkpoints of a run and on any that torch.distributed.checkpoint "
        "has written of a TorchRec model. Where a checkpoint is asked for, the folder of a run "
        "stands for its latest one.",
    )
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")

    inspect = actions.add_parser("inspect", help="tables, sizes, types, shards, step")
    inspect.add_argument("path", type=Path)
    inspect.add_argument("--json", action="store_true", help="for programs")
    inspect.set_defaults(run=_inspect)

    check = actions.add_parser("verify", help="compare all files with their checksums")
    check.add_argument("path", type=Path)
    check.add_argument("--quiet", action="store_true", help="no progress bar")
    check.set_defaults(run=_verify)

    change = actions.add_parser(
        "convert",
        help="write it as another sharding on another number of ranks would have",
        description="For trainings that load with torch.distributed.checkpoint alone: names and "
        "shapes of optimizer states become those of the sharding. fusedrec train and "
        "load_checkpoint need no conversion.",
    )
    change.add_argument("path", type=Path)
    change.add_argument("target", type=Path, help="a new folder")
    change.add_argument("--world-size", type=int, help="ranks; as many as wrote it if not given")
    how = change.add_mutually_exclusive_group()
    how.add_argument("--sharding", choices=SHARDINGS, help=f"of all tables (default {FUSED})")
    how.add_argument("--plan", type=Path, help="a plan file, for its ranks and shardings")
    change.add_argument(
        "--table",
        action="append",
        default=[],
        metavar="NAME=SHARDING",
        help="sharding of one table, may be given several times",
    )
    change.add_argument("--no-verify", action="store_true", help="does not compare checksums first")
    change.add_argument("--quiet", action="store_true", help="no progress bar")
    change.set_defaults(run=_convert)

    out = actions.add_parser("export", help="tables as safetensors or Parquet, for serving")
    out.add_argument("path", type=Path)
    out.add_argument("--output", type=Path, required=True, help="folder, a file for each table")
    out.add_argument("--format", choices=FORMATS, default="safetensors")
    out.add_argument("--tables", help="names with commas between; all tables if not given")
    out.add_argument("--optimizer", action="store_true", help="optimizer states, too")
    out.add_argument("--no-verify", action="store_true", help="does not compare checksums first")
    out.add_argument("--quiet", action="store_true", help="no progress bar")
    out.set_defaults(run=_export)


def _checkpoint(path: Path) -> Path:
    """A checkpoint, or the latest one of a run."""
    if not path.exists():
        raise ValueError(f"{path} does not exist")
    for folder in (path / "checkpoints", path):
        found = find_checkpoints(folder)
        if found:
            print(f"the latest of {len(found)}: {found[-1]}", file=sys.stderr)
            return found[-1]
    return path


def _inspect(arguments: argparse.Namespace) -> None:
    path = _checkpoint(arguments.path)
    if arguments.json:
        print(json.dumps(_described(path), indent=1))
    else:
        show_checkpoint(path)


def _described(path: Path) -> dict[str, Any]:
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


def _verify(arguments: argparse.Namespace) -> int:
    path = _checkpoint(arguments.path)
    problems = _problems(path, arguments.quiet)
    for problem in problems:
        print(problem)
    if problems:
        print(f"{path}: damaged{_before(path)}")
        return DAMAGED
    contents = Contents(path)
    if contents.manifest is None:
        print(f"{path}: readable; there are no checksums to compare")
    else:
        print(f"{path}: {len(contents.manifest.files)} files are what was written")
    return 0


def _problems(path: Path, quiet: bool) -> list[str]:
    return verify(path, lambda names: tqdm(names, unit="file", disable=quiet or None))


def _before(path: Path) -> str:
    """The checkpoint before this one, if there is one."""
    earlier = [p for p in find_checkpoints(path.parent) if p.name < path.name]
    return f"; the one before it is {earlier[-1]}" if earlier else ""


def _checked(path: Path, skip: bool, quiet: bool) -> Contents:
    if not skip:
        problems = _problems(path, quiet)
        if problems:
            raise ValueError(f"{path} is damaged: {'; '.join(problems)}{_before(path)}")
    return Contents(path)


def _convert(arguments: argparse.Namespace) -> None:
    path = _checkpoint(arguments.path)
    contents = _checked(path, arguments.no_verify, arguments.quiet)
    if arguments.plan is not None:
        plan, _ = read_plan(arguments.plan)
        if arguments.world_size not in (None, plan.ranks):
            raise ValueError(
                f"--world-size is {arguments.world_size}, the plan is for {plan.ranks} ranks"
            )
        if arguments.table:
            raise ValueError("--table and --plan are both given: the plan has all tables")
    else:
        manifest = contents.manifest
        ranks = 1 if manifest is None else manifest.world_size
        if arguments.world_size is not None:
            ranks = arguments.world_size
        tables = {}
        for pair in arguments.table:
            name, equals, sharding = pair.partition("=")
            if not equals:
                raise ValueError(f"--table is {pair!r}, must be NAME=SHARDING")
            tables[name] = sharding
        plan = plan_for(contents, ranks, arguments.sharding or FUSED, tables)
    _warn_of_hashing(contents, plan)
    size = sum(
        about.size.numel() * about.properties.dtype.itemsize
        for about in contents.reader.tensors.values()
    )
    with tqdm(
        total=size, unit="B", unit_scale=True, disable=arguments.quiet or None, file=sys.stderr
    ) as bar:
        convert(contents, arguments.target, plan, bar.update)
    print(f"{arguments.target}: {len(contents.tables)} tables for {plan.ranks} ranks")


def _warn_of_hashing(contents: Contents, plan: PlanFile) -> None:
    """Stock shardings take ids for rows."""
    for name, table in contents.tables.items():
        entry = contents.entry(table)
        sharding = plan.tables[name].sharding if name in plan.tables else FUSED
        if entry is not None and entry.hash_seed is not None and sharding != FUSED:
            print(
                f"warning: ids of table {name!r} were hashed with hash_seed {entry.hash_seed}, "
                f"which TorchRec's {sharding} does not do: its rows would be those of other ids "
                "unless you hash them yourself (fusedrec_torchrec.exchange.hashing)",
                file=sys.stderr,
            )


def _export(arguments: argparse.Namespace) -> None:
    contents = _checked(_checkpoint(arguments.path), arguments.no_verify, arguments.quiet)
    names = list(contents.tables)
    if arguments.tables is not None:
        names = [name.strip() for name in arguments.tables.split(",")]
        for name in names:
            if name not in contents.tables:
                raise ValueError(
                    f"--tables names {name!r}, which is no table; there are "
                    f"{', '.join(contents.tables)}"
                )
    need = sum(contents.tables[name].bytes for name in names)
    arguments.output.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(arguments.output).free
    if arguments.format == "safetensors" and need > free:
        raise ValueError(
            f"{arguments.output} has {human_bytes(free)} left, the tables need {human_bytes(need)}"
        )
    for name in tqdm(names, unit="table", disable=arguments.quiet or None):
        table = contents.tables[name]
        export_table(contents, table, arguments.output, arguments.format, arguments.optimizer)
    print(f"{arguments.output}: {len(names)} tables as {arguments.format}")
