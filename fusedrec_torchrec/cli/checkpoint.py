"""``fusedrec checkpoint`` shows, verifies, converts and exports checkpoints."""

import argparse
import sys
from pathlib import Path
from typing import Any

from fusedrec_torchrec.checkpoint.file_names import FORMATS, check_is_checkpoint
from fusedrec_torchrec.sharding.plan_file import read_plan
from fusedrec_torchrec.sharding.sharding_type import FUSED, SHARDINGS
from fusedrec_torchrec.training.run_state import find_checkpoints

__all__ = ["add_command"]


def add_command(commands: Any) -> None:
    """Adds the subcommand and its arguments to those of ``fusedrec``."""
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
    """Returns a checkpoint, or the latest one of a run."""
    if not path.exists():
        raise ValueError(f"{path} does not exist")
    for folder in (path / "checkpoints", path):
        checkpoints = find_checkpoints(folder)
        if checkpoints:
            print(f"the latest of {len(checkpoints)}: {checkpoints[-1]}", file=sys.stderr)
            return checkpoints[-1]
    check_is_checkpoint(path)
    return path


def _inspect(arguments: argparse.Namespace) -> None:
    path = _checkpoint(arguments.path)

    from fusedrec_torchrec.cli.checkpoint_actions import show_checkpoint, show_checkpoint_as_json

    (show_checkpoint_as_json if arguments.json else show_checkpoint)(path)


def _verify(arguments: argparse.Namespace) -> int:
    path = _checkpoint(arguments.path)

    from fusedrec_torchrec.cli.checkpoint_actions import verify_checkpoint

    return verify_checkpoint(path, arguments.quiet)


def _convert(arguments: argparse.Namespace) -> None:
    plan = None
    if arguments.plan is not None:
        if arguments.table:
            raise ValueError("--table and --plan are both given: the plan has all tables")
        plan, _ = read_plan(arguments.plan)
        if arguments.world_size not in (None, plan.ranks):
            raise ValueError(
                f"--world-size is {arguments.world_size}, the plan is for {plan.ranks} ranks"
            )
    tables = {}
    for pair in arguments.table:
        name, equals, sharding = pair.partition("=")
        if not equals:
            raise ValueError(f"--table is {pair!r}, must be NAME=SHARDING")
        tables[name] = sharding
    path = _checkpoint(arguments.path)

    from fusedrec_torchrec.cli.checkpoint_actions import convert_checkpoint

    convert_checkpoint(
        path,
        arguments.target,
        world_size=arguments.world_size,
        plan=plan,
        sharding=arguments.sharding or FUSED,
        tables=tables,
        is_verified=not arguments.no_verify,
        quiet=arguments.quiet,
    )


def _export(arguments: argparse.Namespace) -> None:
    path = _checkpoint(arguments.path)

    from fusedrec_torchrec.cli.checkpoint_actions import export_checkpoint

    export_checkpoint(
        path,
        arguments.output,
        arguments.format,
        tables=arguments.tables,
        with_optimizer=arguments.optimizer,
        is_verified=not arguments.no_verify,
        quiet=arguments.quiet,
    )
