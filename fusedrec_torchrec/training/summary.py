"""Sums up a finished run: a table, summary.json and the curves."""

import json
import math
from pathlib import Path
from typing import Any

from fusedrec_torchrec.core.terminal import human_bytes, print_table
from fusedrec_torchrec.training.config import TrainConfig
from fusedrec_torchrec.training.logs import read_log

SUMMARY = "summary.json"
EXTRA = (
    *("waiting_for_data", "hot_share_of_rows", "early_share_of_rows"),
    *("skipped_steps", "failed_saves"),
    *("rows_fewer_bytes", "gradients_fewer_bytes", "dense_gradients_fewer_bytes"),
)
__all__ = ["SUMMARY", "draw_curves", "report", "summarize"]


def summarize(records: list[dict[str, Any]], result: dict[str, float]) -> dict[str, Any]:
    """Returns the figures of a run, from its records and its last evaluation."""
    train = [record for record in records if record["kind"] == "train"]
    last = train[-1] if train else {}
    summary: dict[str, Any] = {"steps": last.get("step", 0)}
    train_quality = ("log_loss", "normalized_entropy")  # none, where all steps were skipped
    summary |= {f"train_{key}": last[key] for key in train_quality if key in last}
    quality = ("auc", "log_loss", "normalized_entropy", "calibration")
    summary |= {f"eval_{key}": result[key] for key in quality if key in result}
    if "samples_per_second" in result:
        summary["samples_per_second"] = result["samples_per_second"]
    summary |= {
        key: value for key, value in last.items() if key.endswith("_per_step") or key in EXTRA
    }
    return summary


def report(config: TrainConfig, result: dict[str, float]) -> None:
    """Prints the summary of a run and writes it and the curves into the run's folder."""
    folder = config.logging.directory
    records = read_log(folder)
    summary = summarize(records, result)
    (folder / SUMMARY).write_text(json.dumps(summary, indent=1))
    rows = [(key.replace("_", " "), _shown(key, value)) for key, value in summary.items()]
    if config.logging.plots:
        draw_curves(records, folder / "curves.png")
        rows.append(("curves", str(folder / "curves.png")))
    rows.append(("records", str(folder / "metrics.jsonl")))
    print_table(f"run {folder}", ("", ""), rows)


def _shown(key: str, value: float | None) -> str:
    if value is None or math.isnan(value):
        return "-"
    if key.endswith("fewer_bytes"):
        return f"{value:.2f} x"
    if "bytes" in key:
        return f"{human_bytes(value)} per rank"
    if key == "waiting_for_data":
        return f"{value:.1%} of the time"
    if key in ("hot_share_of_rows", "early_share_of_rows"):
        return f"{value:.1%}"
    if key == "samples_per_second":
        return f"{value:.0f}"
    return f"{value:.4f}" if isinstance(value, float) and value < 100 else f"{value:g}"


def draw_curves(records: list[dict[str, Any]], path: Path) -> None:
    """Draws loss, AUC and throughput over the steps."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 3.4), layout="constrained")
    loss, auc, speed = figure.subplots(1, 3)
    for axes, name, title in (
        (loss, "log_loss", "log loss"),
        (auc, "auc", "AUC on held-out data"),
        (speed, "samples_per_second", "samples/s"),
    ):
        for kind, style in (("train", "-"), ("eval", "o-")):
            points = [
                (record["step"], record[name])
                for record in records
                if record["kind"] == kind and record.get(name) is not None
            ]
            if points:
                axes.plot(*zip(*points, strict=True), style, label=kind, markersize=4)
        axes.set_title(title)
        axes.set_xlabel("step")
        axes.grid(alpha=0.3)
    speed.set_ylim(bottom=0)
    loss.legend()
    figure.savefig(path, dpi=120)
