"""Checkpoints of groups whose owners pool: for every other sharding and grid, to the last bit."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.state_dict_loader import load

import fusedrec_torchrec as fr
from fusedrec_torchrec.checkpoint.contents import Contents
from fusedrec_torchrec.checkpoint.load import load_checkpoint
from fusedrec_torchrec.checkpoint.reader import CheckpointReader
from fusedrec_torchrec.checkpoint.save import save_checkpoint
from fusedrec_torchrec.checkpoint.verify import verify
from tests.case import Case, Table, Wrapper, sharded, unsharded
from tests.checkpoint.models import optimizer_of, whole_states, whole_weights
from tests.checkpoint.test_round_trips import Numbers, equal
from tests.cluster import Cluster
from tests.grid.test_checkpoints import grid, load_and_train, train_and_save
from tests.parity import train_step

Clusters = Callable[[int], Cluster]
TABLES = (
    Table("a", 500, dim=8, sharding="fused_table_wise"),
    Table("b", 330, dim=16, sharding="fused_column_wise"),
    Table("c", 41, dim=8),
    Table("d", 64, dim=4, sharding="fused_table_wise"),
)
SHARED = {"sync": "gradients"}


def case_of(
    ranks: int, options: fr.GridOptions | None, sharding: str | None = None, **changes: Any
) -> Case:
    """Tables as above, or all sharded one way; AdaGrad's state is the same in all shardings."""
    settings: dict[str, Any] = {"tables": TABLES, "optimizer": "adagrad", "steps": 6} | changes
    case = Case(batch_sizes=(4,) * ranks, grid=options, repeated=True, **settings)
    return case if sharding is None else case.only(sharding)


OWNED = case_of(4, grid(2, **SHARED))
OTHERS = {
    "2x2": OWNED,
    "2x2, groups adjacent": case_of(4, grid(2, layout="groups_adjacent", **SHARED)),
    "1x4": case_of(4, grid(1, **SHARED)),
    "2x2, row-wise": case_of(4, grid(2, **SHARED), "fused_row_wise"),
    "1D": case_of(4, None),
    "row_wise": case_of(4, None, "row_wise"),
    "column_wise": case_of(4, None, "column_wise"),
}
SLOW = pytest.mark.slow


@pytest.mark.parametrize(
    "other",
    [
        "2x2",
        pytest.param("2x2, groups adjacent", marks=SLOW),
        pytest.param("1x4", marks=SLOW),
        pytest.param("2x2, row-wise", marks=SLOW),
        "1D",
        pytest.param("row_wise", marks=SLOW),
        "column_wise",
    ],
)
def test_training_goes_on_in_every_grid_and_sharding_and_back(
    cluster_4: Cluster, tmp_path: Path, other: str
) -> None:
    for saved, loaded in ((OWNED, OTHERS[other]), (OTHERS[other], OWNED)):
        folder = tmp_path / ("there" if saved is OWNED else "back")
        cluster_4.run(train_and_save, saved, str(folder))
        cluster_4.run(load_and_train, loaded, saved, str(folder))


def save_trained(case: Case, folder: str) -> Numbers:
    model: Any = sharded(case)
    optimizer = optimizer_of(case, model)
    for step in range(3):
        train_step(case, model, step, optimizer)
        if case.grid is not None:
            model.sync()
    save_checkpoint(folder, model, optimizer, step=3)
    return whole_weights(case, model), whole_states(case, optimizer)


def load_into(case: Case, folder: str) -> Numbers:
    """Into a model that has been trained on something else."""
    model: Any = sharded(case)
    optimizer = optimizer_of(case, model)
    train_step(case, model, 17, optimizer)
    load_checkpoint(folder, model, optimizer)
    return whole_weights(case, model), whole_states(case, optimizer)


def test_an_unsharded_model_and_all_others_load_what_groups_averaged(
    clusters: Clusters, tmp_path: Path
) -> None:
    folder = tmp_path / "it"
    averaged = case_of(4, grid(2, sync_every=1))
    want = clusters(4).run(save_trained, averaged, str(folder))[0]
    assert verify(folder) == []
    module = Wrapper(unsharded(averaged, "cpu"))
    state = {"model": module.state_dict()}
    load(state, checkpoint_id=folder, no_dist=True)
    for name, weight in want[0].items():
        assert torch.equal(state["model"][f"sparse.embedding_bags.{name}.weight"].double(), weight)
    reader = CheckpointReader(folder)
    for name, table in Contents(folder).tables.items():
        (key,) = table.states.values()
        assert torch.equal(reader.whole(key).double(), want[1][name])
    for case in (
        case_of(2, None),
        case_of(2, None, "table_wise"),
        case_of(2, None, "fused_row_wise"),
        case_of(2, None, "fused_column_wise"),
        case_of(2, grid(1)),
    ):
        equal(clusters(2).run(load_into, case, str(folder))[0], want)


def test_row_wise_state_of_columns(clusters: Clusters, tmp_path: Path) -> None:
    """Each column shard has numbers of its own, and others have their mean."""
    folder = tmp_path / "it"
    settings = {"optimizer": "rowwise_adagrad"}
    want = clusters(4).run(save_trained, case_of(4, grid(2), **settings), str(folder))[0]
    assert want[1]["b"].numel() == 2 * 330
    for ranks, options in ((4, grid(2)), (2, None)):
        got = clusters(ranks).run(load_into, case_of(ranks, options, **settings), str(folder))[0]
        equal(got, want)
    whole = case_of(2, None, "table_wise", **settings)
    got = clusters(2).run(load_into, whole, str(folder))[0]
    mean = want[1]["b"].view(2, 330).mean(0)
    torch.testing.assert_close(got[1]["b"].view(330), mean, rtol=1e-6, atol=0)
    want[1]["b"] = got[1]["b"]
    equal(got, want)
