"""``fusedrec inspect`` shows what a plan, a checkpoint, a run or prepared data contains."""

import argparse
from pathlib import Path
from typing import Any

from fusedrec_torchrec.checkpoint.file_names import METADATA_FILE
from fusedrec_torchrec.cli.json_output import add_json, print_json
from fusedrec_torchrec.cli.manual import add_parser
from fusedrec_torchrec.core.config import to_mapping
from fusedrec_torchrec.core.terminal import print_table
from fusedrec_torchrec.sharding.plan_file import read_plan
from fusedrec_torchrec.training.data.file_names import MANIFEST
from fusedrec_torchrec.training.logs import RECORDS, read_log
from fusedrec_torchrec.training.run_state import RUN_STATE, find_checkpoints

__all__ = ["add_command"]

PLAN = "plan.yaml"
EXAMPLES = {
    "fusedrec inspect runs/tiny": "Shows how far a run is, its checkpoints and its plan.",
    "fusedrec inspect runs/tiny/plan.yaml": "Shows where the shards of each table live.",
    "fusedrec inspect runs/tiny/checkpoints/step_00000400 --json": "Prints what a checkpoint holds "
    "for a program.",
}


def add_command(commands: Any) -> None:
    """Adds the subcommand and its arguments to those of ``fusedrec``."""
    parser = add_parser(
        commands,
        "inspect",
        purpose="Shows what is in a plan file (plan.yaml), a checkpoint, the folder of a run, or a "
        "folder of prepared data; which of them it is, it finds out by itself.  `fusedrec watch` "
        "shows the curves of a run, `fusedrec checkpoint` does more with checkpoints.",
        examples=EXAMPLES,
        read_on="docs/training.md, docs/checkpoints.md",
    )
    parser.add_argument(
        "path", type=Path, help="plan file, checkpoint, folder of a run, or of prepared data"
    )
    add_json(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> None:
    """Finds out what there is, and shows it."""
    path: Path = arguments.path
    if not path.exists():
        raise ValueError(f"{path} does not exist")
    if path.is_file():
        _show_plan(path, arguments.json)
    elif (path / METADATA_FILE).is_file() or (path / RUN_STATE).is_file():
        from fusedrec_torchrec.cli.checkpoint_actions import checkpoint_figures, show_checkpoint

        if arguments.json:
            print_json({"kind": "checkpoint", **checkpoint_figures(path)})
        else:
            show_checkpoint(path)
    elif (path / MANIFEST).is_file():
        from fusedrec_torchrec.training.data.prepared import PreparedData
        from fusedrec_torchrec.training.data.summary import prepared_figures, print_prepared

        data = PreparedData.open(path)
        if arguments.json:
            print_json({"kind": "prepared", **prepared_figures(data)})
        else:
            print_prepared(data)
    elif (path / PLAN).is_file():
        _show_run(path, arguments.json)
    else:
        raise ValueError(
            f"{path} holds nothing that inspect knows: a {PLAN}, a checkpoint ({RUN_STATE}), a "
            f"run ({PLAN}, {RECORDS}) or prepared data ({MANIFEST})"
        )


def _show_plan(path: Path, as_json: bool) -> None:
    file, _ = read_plan(path)
    if as_json:
        print_json({"kind": "plan", "path": path, **to_mapping(file)})
        return
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


def _show_run(path: Path, as_json: bool) -> None:
    records = read_log(path)
    checkpoints = find_checkpoints(path / "checkpoints")
    evals = [record for record in records if record["kind"] == "eval"]
    last_step = records[-1]["step"] if records else 0
    if as_json:
        file, _ = read_plan(path / PLAN)
        print_json(
            {
                "kind": "run",
                "path": path,
                "step": last_step,
                "evaluation": evals[-1] if evals else None,
                "checkpoints": [checkpoint.name for checkpoint in checkpoints],
                "plan": to_mapping(file),
            }
        )
        return
    rows: list[tuple[str, object]] = [("last step", last_step)]
    if evals:
        for title, key in (("last AUC", "auc"), ("last log loss", "log_loss")):
            value = evals[-1].get(key)
            rows.append((title, f"{value:.4f}" if isinstance(value, float) else "-"))
    rows.append(("checkpoints", ", ".join(p.name for p in checkpoints) or "none"))
    print_table(f"run {path}", ("", ""), rows)
    _show_plan(path / PLAN, as_json)
