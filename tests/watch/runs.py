"""Folders of runs as trainings leave them."""

import json
from pathlib import Path
from typing import Any

import yaml

CONFIG = {
    "launch": {"ranks": 2, "nodes": 1},
    "data": {"batch_size": 100},
    "sharding": {"type": "fused_row_wise"},
    "logging": {"log_every": 10},
    "steps": 50,
}


def record(step: int, **changes: Any) -> dict[str, Any]:
    """A record of training, as the loop writes it."""
    return {
        "step": step,
        "kind": "train",
        "log_loss": 0.7 - step / 1000,
        "samples_per_second": 1000.0,
        "waiting_for_data": 0.02,
        "collectives_per_step": 4,
        "bytes_sent_per_step": 5000,
        "all_to_all_per_step": 3,
        "all_to_all_bytes_per_step": 4000,
        "all_reduce_per_step": 1,
        "all_reduce_bytes_per_step": 1000,
        "rows_looked_up_by_rank": [300, 100],
        "bytes_sent_by_rank": [5000, 6000],
        "stage_ms": {"dedup": 0.5, "lookup": 1.5, "other": 3.0},
        "hot_share_of_rows": 0.25,
        "learning_rate_tables": 0.1,
        **changes,
    }


def evaluation(step: int, **changes: Any) -> dict[str, Any]:
    return {"step": step, "kind": "eval", "log_loss": 0.66, "auc": 0.75, **changes}


def text_of(records: list[dict[str, Any]]) -> str:
    return "".join(json.dumps(one) + "\n" for one in records)


def write_run(
    folder: Path, records: list[dict[str, Any]], finished: bool = False, **config: Any
) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.yaml").write_text(yaml.safe_dump({**CONFIG, **config}))
    (folder / "metrics.jsonl").write_text(text_of(records))
    if finished:
        (folder / "summary.json").write_text(json.dumps({"steps": records[-1]["step"]}))
    return folder


def whole_run(folder: Path, steps: int = 50, **changes: Any) -> Path:
    """A run that has ended, with records of every ten steps and two evaluations."""
    records = [record(step, **changes) for step in range(10, steps + 1, 10)]
    records += [evaluation(steps)]
    return write_run(folder, records, finished=True, steps=steps)
