"""One side of a test between two environments: saves checkpoints, or loads those of the other.

``python -m tests.checkpoint.stacks save <folder>`` trains, saves and writes down all numbers;
``load <folder> <file>`` loads what is there into models that were trained on something else, and
writes down all numbers into a file.
"""

import sys
from pathlib import Path
from typing import Any

import torch

import fusedrec_torchrec as fr
from fusedrec_torchrec.core.config import from_mapping
from fusedrec_torchrec.training.config import TrainConfig
from fusedrec_torchrec.training.loop import Training
from fusedrec_torchrec.training.source import open_source
from tests.checkpoint.test_round_trips import load_and_save, train_and_save
from tests.cluster import Cluster
from tests.training.runs import CPU, small, train, whole_state

NUMBERS = "numbers.pt"
RANKS = 2
# Name: sharding where it is saved, sharding where it is loaded, settings of the case.
MODELS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "bags": ("fused_row_wise", "fused_row_wise", {}),
    "whole tables": ("fused_table_wise", "fused_table_wise", {}),
    "columns": ("fused_column_wise", "fused_column_wise", {}),
    "whole tables to columns": (
        "fused_table_wise",
        "fused_column_wise",
        {"optimizer": "adagrad"},  # row-wise, each part of the columns has a state of its own
    ),
    "sequences": ("fused_row_wise", "fused_row_wise", {"kind": "ec", "optimizer": "adagrad"}),
    "hot rows": (
        "fused_row_wise",
        "fused_row_wise",
        {"hot_options": fr.HotOptions(tables={"a": fr.HotRule(ids=(0, 1, 2, 49))})},
    ),
    "to stock": ("fused_row_wise", "table_wise", {}),
    "from stock": ("row_wise", "fused_row_wise", {}),
}
TRAINING = "a training"


def run_of(folder: str) -> dict[str, Any]:
    return small(folder, steps=6, eval_every=0, checkpoint={"every": 6})


def resumed(folder: str, checkpoint: str) -> dict[str, torch.Tensor]:
    config = from_mapping(TrainConfig, run_of(folder))
    return whole_state(Training(config, open_source(config), CPU, Path(checkpoint)))


def save(folder: Path) -> None:
    cluster = Cluster(RANKS)
    numbers: dict[str, Any] = {
        name: cluster.run(train_and_save, sharding, RANKS, str(folder / name), settings)[0]
        for name, (sharding, _, settings) in MODELS.items()
    }
    runs = cluster.run(train, run_of(str(folder / TRAINING)))
    numbers[TRAINING] = [run["state"] for run in runs]
    torch.save(numbers, folder / NUMBERS)
    cluster.stop()


def load(folder: Path, file: Path) -> None:
    cluster = Cluster(RANKS)
    numbers: dict[str, Any] = {
        name: cluster.run(load_and_save, sharding, RANKS, str(folder / name), None, settings)[0][0]
        for name, (_, sharding, settings) in MODELS.items()
    }
    (checkpoint,) = (folder / TRAINING).rglob("step_*")
    numbers[TRAINING] = cluster.run(resumed, str(folder / f"{TRAINING} resumed"), str(checkpoint))
    torch.save(numbers, file)
    cluster.stop()


if __name__ == "__main__":
    action, *paths = sys.argv[1:]
    if action == "save":
        save(Path(paths[0]))
    else:
        load(Path(paths[0]), Path(paths[1]))
