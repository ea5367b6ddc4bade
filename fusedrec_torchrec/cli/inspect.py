"""``fusedrec inspect`` shows what a plan, a checkpoint, a run or prepared data contains."""

import argparse
from pathlib import Path
from typing import Any

from fusedrec_torchrec.checkpoint.file_names import METADATA_FILE
from fusedrec_torchrec.core.terminal import print_table
from fusedrec_torchrec.sharding.plan_file import read_plan
from fusedrec_torchrec.training.data.file_names import MANIFEST
from fusedrec_torchrec.training.logs import read_log
from fusedrec_torchrec.training.run_state import RUN_STATE, find_checkpoints

__all__ = ["add_command"]


def add_command(commands: Any) -> None:
    """Adds the subcommand and its arguments to those of ``fusedrec``."""
    parser = commands.add_parser(
        "inspect",
        help="show what a plan, checkpoint, run or prepared data contains",
        description="Shows what is in a plan file (plan.yaml), a checkpoint, the folder of a run, "
        "or a folder of prepared data.",
    )
    parser.add_argument("path", type=Path)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> None:
    """Finds out what there is, and shows it."""
    path: Path = arguments.path
    if not path.exists():
        raise ValueError(f"{path} does not exist")
    if path.is_file():
        _show_plan(path)
    elif (path / METADATA_FILE).is_file() or (path / RUN_STATE).is_file():
        from fusedrec_torchrec.cli.checkpoint_actions import show_checkpoint

        show_checkpoint(path)
    elif (path / MANIFEST).is_file():
        from fusedrec_torchrec.training.data.prepared import PreparedData
        from fusedrec_torchrec.training.data.summary import print_prepared

        print_prepared(PreparedData.open(path))
    elif (path / "plan.yaml").is_file():
        _show_run(path)
    else:
        raise ValueError(
            f"{path} holds nothing that inspect knows: a plan.yaml, a checkpoint ({RUN_STATE}), a "
            f"run (plan.yaml, metrics.jsonl) or prepared data ({MANIFEST})"
        )


def _show_plan(path: Path) -> None:
    file, _ = read_plan(path)
    rows = []
    for name, table in file.tables.items():
        where = "all ranks hold all of it"
        if table.rows_per_rank is not None:
            where = f"rows {table.rows_per_rank}"
        elif table.columns_per_rank is not None:
            where = f"columns {table.columns_per_rank}"
        elif table.shards is not None:
            where = ", ".join(f"{rows} x {columns}" for _, (rows, columns) in table.shards)
        if table.ranks is not None and len(table.ranks) < file.ranks:
            where += f" on rank {', '.join(map(str, table.ranks))}"
        rows.append((name, table.sharding, table.kernel, where, table.hot_rows or ""))
    what = f"plan for {file.ranks} ranks"
    if file.grid is not None:
        what += f" in groups of {file.grid.sharding_group_size}"
    print_table(what, ("table", "sharding", "kernel", "shards", "hot rows"), rows)


def _show_run(path: Path) -> None:
    records = read_log(path)
    checkpoints = find_checkpoints(path / "checkpoints")
    evals = [record for record in records if record["kind"] == "eval"]
    rows: list[tuple[str, object]] = [("last step", records[-1]["step"] if records else 0)]
    if evals:
        for title, key in (("last AUC", "auc"), ("last log loss", "log_loss")):
            value = evals[-1].get(key)
            rows.append((title, f"{value:.4f}" if isinstance(value, float) else "-"))
    rows.append(("checkpoints", ", ".join(p.name for p in checkpoints) or "none"))
    print_table(f"run {path}", ("", ""), rows)
    _show_plan(path / "plan.yaml")
