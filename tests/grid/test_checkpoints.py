"""Checkpoints of 2D training: one replica's size, for every other sharding and grid, and back."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

import fusedrec_torchrec as fr
from tests.case import Case, Table, sharded
from tests.cluster import Cluster
from tests.parity import check, train_step
from tests.reference import unsharded_run

TABLES = (
    Table("a", 500, dim=8),
    Table("b", 330, dim=16),
    Table("c", 41, dim=8),
    Table("d", 64, dim=4),
)
BYTES = sum(t.rows * (t.dim + 1) * 4 for t in TABLES)


def grid(size: int, **options: Any) -> fr.GridOptions:
    return fr.GridOptions(sharding_group_size=size, **options)


def case_of(ranks: int, options: fr.GridOptions | None, sharding: str = "fused_row_wise") -> Case:
    tables = tuple(dataclasses.replace(t, sharding=sharding) for t in TABLES)
    return Case(
        tables=tables,
        batch_sizes=(4,) * ranks,
        optimizer="rowwise_adagrad",
        steps=6,
        grid=options,
    )


def state_of(model: Any) -> dict[str, Any]:
    return {"model": model.state_dict(), "optimizer": model.fused_optimizer.state_dict()}


def train_and_save(case: Case, folder: str) -> None:
    """Half of the steps; replicas share gradients, so that the whole run can be compared."""
    model = sharded(case)
    for step in range(3):
        train_step(case, model, step)
        if case.grid is not None:
            model.sync()
    save(state_of(model), checkpoint_id=folder)


def load_and_train(case: Case, saved: Case, folder: str) -> None:
    """The other half, against an uninterrupted run."""
    run = unsharded_run(saved, dist.get_world_size())
    model = sharded(case)
    train_step(case, model, 17)  # other values than those that will be loaded
    state = state_of(model)
    load(state, checkpoint_id=folder)
    model.load_state_dict(state["model"])
    model.fused_optimizer.load_state_dict(state["optimizer"])
    outputs: list[dict[str, torch.Tensor]] = [{}] * 3
    for step in range(3, 6):
        outputs.append(train_step(case, model, step))
        if case.grid is not None:
            model.sync()
    run.outputs[:3] = [[{}] * dist.get_world_size()] * 3
    check(case, run, outputs, model)


SHARED = {"sync": "gradients"}
ENDS = {
    "2x2": case_of(4, grid(2, **SHARED)),
    "2x2, groups adjacent": case_of(4, grid(2, layout="groups_adjacent", **SHARED)),
    "1x4": case_of(4, grid(1, **SHARED)),
    "1D": case_of(4, None),
    "row_wise": case_of(4, None, "row_wise"),
    "table_wise": case_of(4, None, "table_wise"),
}


@pytest.mark.parametrize(
    ("saved", "loaded"),
    [
        ("2x2", "2x2"),
        pytest.param("2x2", "2x2, groups adjacent", marks=pytest.mark.slow),
        ("2x2", "1x4"),
        ("2x2", "1D"),
        ("2x2", "row_wise"),
        pytest.param("2x2", "table_wise", marks=pytest.mark.slow),
        pytest.param("1x4", "2x2", marks=pytest.mark.slow),
        ("1D", "2x2"),
        ("row_wise", "2x2"),
        pytest.param("table_wise", "1x4", marks=pytest.mark.slow),
    ],
)
def test_every_grid_and_sharding(
    cluster_4: Cluster, tmp_path: Path, saved: str, loaded: str
) -> None:
    cluster_4.run(train_and_save, ENDS[saved], str(tmp_path))
    cluster_4.run(load_and_train, ENDS[loaded], ENDS[saved], str(tmp_path))


def test_a_checkpoint_has_one_replica(cluster_4: Cluster, tmp_path: Path) -> None:
    sizes = {}
    for name in ("2x2", "1x4", "1D"):
        folder = tmp_path / name.replace(" ", "_")
        cluster_4.run(train_and_save, ENDS[name], str(folder))
        sizes[name] = sum(f.stat().st_size for f in folder.glob("*.distcp"))
    assert sizes["1D"] > BYTES
    for name in ("2x2", "1x4"):
        assert sizes[name] < sizes["1D"] + BYTES / 4, sizes


def load_elsewhere(case: Case, folder: str) -> list[float]:
    model = sharded(case)
    state = state_of(model)
    load(state, checkpoint_id=folder)
    model.load_state_dict(state["model"])
    total = sum(
        float(part.double().sum()) for value in model.state_dict().values() for part in parts(value)
    )
    found = torch.tensor([total], dtype=torch.float64)
    dist.all_reduce(found)
    return found.tolist()


def parts(value: Any) -> list[torch.Tensor]:
    from tests.parity import local_parts

    return [part for _, part in local_parts(value)]


def test_another_number_of_ranks(cluster_4: Cluster, cluster_2: Cluster, tmp_path: Path) -> None:
    cluster_4.run(train_and_save, ENDS["2x2"], str(tmp_path))
    want = cluster_4.run(load_elsewhere, ENDS["1D"], str(tmp_path))[0][0]
    for options in (None, grid(1)):
        got = cluster_2.run(load_elsewhere, case_of(2, options), str(tmp_path))[0][0]
        replicas = 1 if options is None else 2
        assert got == pytest.approx(replicas * want)


def save_in_between(case: Case) -> None:
    """In the middle of ``sync_every`` steps groups differ; ``sync_now`` brings them together."""
    model: Any = sharded(case)
    for step in range(2):
        train_step(case, model, step)
        model.sync()
    pg = model._groups.replica_pg

    def equal() -> bool:
        return all(
            torch.equal(mine, theirs)
            for value in model.state_dict().values()
            for mine in parts(value)
            for theirs in gathered(mine, pg)
        )

    assert not equal()
    model.sync_now()
    assert equal()


def gathered(mine: torch.Tensor, pg: dist.ProcessGroup) -> list[torch.Tensor]:
    everywhere = [torch.empty_like(mine) for _ in range(pg.size())]
    dist.all_gather(everywhere, mine.contiguous(), group=pg)
    return everywhere


def test_in_the_middle_of_two_syncs(cluster_4: Cluster) -> None:
    cluster_4.run(save_in_between, case_of(4, grid(2, sync_every=5)))
