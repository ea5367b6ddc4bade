"""Checkpoints that are saved on CUDA are loaded on CUDA and on CPU; skipped without a GPU."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch

import fusedrec_torchrec as fr
from tests.case import Case
from tests.checkpoint.test_round_trips import equal, load_and_save, train_and_save
from tests.cluster import Cluster
from tests.grid import test_checkpoints as resumed
from tests.hot.test_checkpoints import case_of as of_hot_rows
from tests.hot.test_checkpoints import save_and_load, stop_and_resume

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        torch.cuda.device_count() < 2, reason="needs two GPUs, or the emulated ones"
    ),
]
OTHERS = ["fused_row_wise", "fused_table_wise", "row_wise"]


@pytest.fixture
def cluster_of(gpu_cluster: Cluster, cluster_2: Cluster) -> dict[str, Cluster]:
    return {"cuda": gpu_cluster, "cpu": cluster_2}


@pytest.mark.parametrize(("saved", "loaded"), [("cuda", "cuda"), ("cuda", "cpu"), ("cpu", "cuda")])
@pytest.mark.parametrize("other", OTHERS)
def test_a_checkpoint_has_the_same_bits_on_every_device(
    cluster_of: dict[str, Cluster], tmp_path: Path, saved: str, loaded: str, other: str
) -> None:
    """fused_row_wise to another sharding on another device, and back."""
    there, back = str(tmp_path / "there"), str(tmp_path / "back")
    first, second = {"device": saved}, {"device": loaded}
    want = cluster_of[saved].run(train_and_save, "fused_row_wise", 2, there, first)[0]
    (between, _), *_ = cluster_of[loaded].run(load_and_save, other, 2, there, back, second)
    equal(between, want)
    (got, _), *_ = cluster_of[saved].run(load_and_save, "fused_row_wise", 2, back, None, first)
    equal(got, want)


def with_hot_rows(case: Case) -> Case:
    tables = tuple(dataclasses.replace(t, hot=tuple(range(0, t.rows, 5))) for t in case.tables)
    return dataclasses.replace(case, tables=tables)


KINDS: dict[str, Case] = {
    "plain": resumed.case_of(2, None),
    "hot rows": with_hot_rows(resumed.case_of(2, None)),
    "2D": resumed.case_of(2, fr.GridOptions(sharding_group_size=1, sync="gradients")),
}


@pytest.mark.parametrize(
    ("saved", "loaded"),
    [
        *((f"{kind} cuda", f"{kind} {device}") for kind in KINDS for device in ("cuda", "cpu")),
        *((f"{kind} cpu", f"{kind} cuda") for kind in KINDS),
        ("hot rows cuda", "plain cpu"),
        ("2D cuda", "hot rows cpu"),
        ("hot rows cuda", "2D cuda"),
    ],
)
def test_training_goes_on_as_if_it_had_not_been_interrupted(
    cluster_of: dict[str, Cluster], tmp_path: Path, saved: str, loaded: str
) -> None:
    """Outputs, weights and optimizer state, against one run of the unsharded module."""
    (before, first), (after, second) = (end.rsplit(" ", 1) for end in (saved, loaded))
    case, other = (
        dataclasses.replace(KINDS[kind], device=device)
        for kind, device in ((before, first), (after, second))
    )
    cluster_of[first].run(resumed.train_and_save, case, str(tmp_path))
    cluster_of[second].run(resumed.load_and_train, other, case, str(tmp_path))


def test_hot_rows_are_loaded_in_place(gpu_cluster: Cluster, tmp_path: Any) -> None:
    gpu_cluster.run(save_and_load, of_hot_rows(device="cuda"), str(tmp_path))


def test_state_dicts_fit_every_hot_set(gpu_cluster: Cluster) -> None:
    case = of_hot_rows(device="cuda")
    tables = (case.tables[0], dataclasses.replace(case.tables[1], hot=(30, 1)), case.tables[2])
    gpu_cluster.run(stop_and_resume, case, dataclasses.replace(case, tables=tables))
