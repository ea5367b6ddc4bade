"""``fusedrec checkpoint`` shows, verifies, converts and exports checkpoints."""

import argparse
import sys
from pathlib import Path
from typing import Any

from fusedrec_torchrec.checkpoint.file_names import FORMATS, check_is_checkpoint
from fusedrec_torchrec.cli.json_output import add_json, print_json
from fusedrec_torchrec.cli.manual import add_parser
from fusedrec_torchrec.sharding.plan_file import read_plan
from fusedrec_torchrec.sharding.sharding_type import FUSED, SHARDINGS
from fusedrec_torchrec.training.run_state import find_checkpoints

__all__ = ["add_command"]

READ_ON = "docs/checkpoints.md"
LATEST = "runs/tiny/checkpoints/step_00000400"
EXAMPLES = {
    "fusedrec checkpoint inspect runs/tiny": "Shows the tables of a run's latest checkpoint.",
    "fusedrec checkpoint verify runs/tiny": "Compares its files with their checksums.",
    "fusedrec checkpoint export runs/tiny --output exported --tables country": "Writes a table as "
    "safetensors.",
}
INSPECT_EXAMPLES = {
    "fusedrec checkpoint inspect runs/tiny": "Shows the latest checkpoint of a run.",
    f"fusedrec checkpoint inspect {LATEST} --json": "Prints one for a program.",
}
VERIFY_EXAMPLES = {
    "fusedrec checkpoint verify runs/tiny": "Verifies the latest checkpoint of a run.",
    f"fusedrec checkpoint verify {LATEST} --json": "Prints the answer for a program.",
}
CONVERT_EXAMPLES = {
    "fusedrec checkpoint convert runs/tiny converted --sharding table_wise": "Makes it one of "
    "whole tables.",
    "fusedrec checkpoint convert runs/tiny for_eight --world-size 8 --table user=row_wise": "Makes "
    "it one of eight ranks, with another sharding of one table.",
}
EXPORT_EXAMPLES = {
    "fusedrec checkpoint export runs/tiny --output tables": "Writes all tables as safetensors.",
    "fusedrec checkpoint export runs/tiny --output users --format parquet --tables user": "Writes "
    "one table as Parquet.",
}


def add_command(commands: Any) -> None:
    """Adds the subcommand and its arguments to those of ``fusedrec``."""
    parser = add_parser(
        commands,
        "checkpoint",
        purpose="Works on checkpoints of a run and on any that torch.distributed.checkpoint has "
        "written of a TorchRec model. Where a checkpoint is asked for, the folder of a run stands "
        "for its latest one.",
        examples=EXAMPLES,
        read_on=READ_ON,
    )
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    _add_inspect(actions)
    _add_verify(actions)
    _add_convert(actions)
    _add_export(actions)


def _add_inspect(actions: Any) -> None:
    inspect = add_parser(
        actions,
        "inspect",
        summary="tables, sizes, types, shards, step",
        purpose="Shows what a checkpoint holds: its step, its tables with sizes, types, shards and "
        "optimizer states, and what else is in it.  It reads no weights.",
        examples=INSPECT_EXAMPLES,
        read_on=READ_ON,
    )
    _add_path(inspect)
    add_json(inspect)
    inspect.set_defaults(run=_inspect)


def _add_verify(actions: Any) -> None:
    check = add_parser(
        actions,
        "verify",
        summary="compare all files with their checksums",
        purpose="Reads all files of a checkpoint and compares them with the checksums that were "
        "taken when it was written.  Exit code 1 if it is damaged.",
        examples=VERIFY_EXAMPLES,
        read_on=READ_ON,
    )
    _add_path(check)
    check.add_argument("--quiet", action="store_true", help="no progress bar")
    add_json(check)
    check.set_defaults(run=_verify)


def _add_convert(actions: Any) -> None:
    change = add_parser(
        actions,
        "convert",
        summary="write it as another sharding on another number of ranks would have",
        purpose="For trainings that load with torch.distributed.checkpoint alone: names and shapes "
        "of optimizer states become those of the sharding. fusedrec train and load_checkpoint need "
        "no conversion.",
        examples=CONVERT_EXAMPLES,
        read_on=READ_ON,
    )
    _add_path(change)
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


def _add_export(actions: Any) -> None:
    out = add_parser(
        actions,
        "export",
        summary="tables as safetensors or Parquet, for serving",
        purpose="Writes each table of a checkpoint into a file of its own, whole, in a format that "
        "serving and analysis can read.",
        examples=EXPORT_EXAMPLES,
        read_on=f"docs/serve.md, {READ_ON}",
    )
    _add_path(out)
    out.add_argument("--output", type=Path, required=True, help="folder, a file for each table")
    out.add_argument(
        "--format", choices=FORMATS, default="safetensors", help="(default %(default)s)"
    )
    out.add_argument("--tables", help="names with commas between; all tables if not given")
    out.add_argument("--optimizer", action="store_true", help="optimizer states, too")
    out.add_argument("--no-verify", action="store_true", help="does not compare checksums first")
    out.add_argument("--quiet", action="store_true", help="no progress bar")
    out.set_defaults(run=_export)


def _add_path(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("path", type=Path, help="a checkpoint, or a run for its latest one")


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

    from fusedrec_torchrec.cli.checkpoint_actions import checkpoint_figures, show_checkpoint

    if arguments.json:
        print_json(checkpoint_figures(path))
    else:
        show_checkpoint(path)


def _verify(arguments: argparse.Namespace) -> int:
    path = _checkpoint(arguments.path)

    from fusedrec_torchrec.cli.checkpoint_actions import verify_checkpoint

    return verify_checkpoint(path, arguments.quiet, arguments.json)


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
