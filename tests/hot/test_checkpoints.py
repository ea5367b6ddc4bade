"""Checkpoints never show replicas, and whoever writes into the tables is heard."""

import dataclasses
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torchrec.distributed.model_parallel import DistributedModelParallel

from tests.case import Case, Table, sharded
from tests.cluster import Cluster
from tests.hot.replicas import hot_rows, replica_bits, same, same_on_all_ranks, without_hot_rows
from tests.parity import check, local_parts, train_step
from tests.reference import unsharded_run

TABLES = (
    Table("a", 50, dim=8, hot=(0, 1, 2, 25, 49)),
    Table("b", 33, dim=16, hot=(0, 1, 20)),
    Table("c", 20, dim=8),
)


def case_of(**kwargs: Any) -> Case:
    return Case(tables=TABLES, batch_sizes=(5, 5), optimizer="adagrad", steps=6, **kwargs)


def stop_and_resume(case: Case, resumed: Case) -> None:
    """Half of the steps, state moved to a new model, other half: equals an uninterrupted run."""
    run = unsharded_run(case, dist.get_world_size())
    first, second = sharded(case), sharded(resumed)
    half = case.steps // 2
    outputs = [train_step(case, first, step) for step in range(half)]
    for step in range(2):  # other values than those that will be loaded
        train_step(resumed, second, step)
    second.load_state_dict(first.state_dict())
    second.fused_optimizer.load_state_dict(first.fused_optimizer.state_dict())
    outputs += [train_step(resumed, second, step) for step in range(half, case.steps)]
    check(resumed, run, outputs, second)


@pytest.mark.parametrize("direction", ["hot to hot", "hot to other hot", "hot to plain", "to hot"])
def test_state_dicts_fit_every_hot_set(cluster_2: Cluster, direction: str) -> None:
    case = case_of()
    other = dataclasses.replace(
        case, tables=(TABLES[0], dataclasses.replace(TABLES[1], hot=(30, 1)), TABLES[2])
    )
    first, second = {
        "hot to hot": (case, case),
        "hot to other hot": (case, other),
        "hot to plain": (case, without_hot_rows(case)),
        "to hot": (without_hot_rows(case), case),
    }[direction]
    cluster_2.run(stop_and_resume, first, second)


def test_state_dicts_fit_stock_row_wise(cluster_2: Cluster) -> None:
    case = case_of()
    cluster_2.run(stop_and_resume, case, without_hot_rows(case).only("row_wise"))


def train_and_look(case: Case) -> None:
    """State dicts that are only looked at, in any step, by any rank, change nothing."""
    run = unsharded_run(case, dist.get_world_size())
    model = sharded(case)
    outputs = []
    for step in range(case.steps):
        outputs.append(train_step(case, model, step))
        if step % 2 == dist.get_rank() % 2:
            model.state_dict()
        if step == 3 and dist.get_rank() == 0:
            model.fused_optimizer.state_dict()
        same_on_all_ranks(replica_bits(model))
    check(case, run, outputs, model)


def test_looking_at_a_state_dict_changes_nothing(cluster_2: Cluster) -> None:
    cluster_2.run(train_and_look, case_of())


def tensors(model: DistributedModelParallel) -> list[torch.Tensor]:
    """The memory of weights and optimizer state on this rank."""
    states = model.fused_optimizer.state_dict()["state"]
    whole = [*model.state_dict().values(), *(v for s in states.values() for v in s.values())]
    return [part for value in whole for _, part in local_parts(value)]


def write_in_place(case: Case, when: str, through_data: bool) -> None:
    """The same writes into a model with hot rows and one without: equal training after that."""
    models = {each: sharded(each) for each in (case, without_hot_rows(case))}
    kept = {each: tensors(model) for each, model in models.items()}
    for step in range(case.steps):
        for each, model in models.items():
            if step in (2, 4):
                views = kept[each] if when == "kept views" else tensors(model)
                # On one rank only, at the second time.
                if step == 2 or dist.get_rank() == 1:
                    for view in views:
                        target = view.data if through_data else view
                        target[:3] *= 2
            train_step(each, model, step)
    same_on_all_ranks(replica_bits(models[case]))
    got, want = models.values()
    same(got.state_dict(), want.state_dict())
    same(got.fused_optimizer.state_dict()["state"], want.fused_optimizer.state_dict()["state"])


@pytest.mark.parametrize("through_data", [False, True], ids=["tensor", "data"])
def test_writing_into_a_state_dict_counts(cluster_2: Cluster, through_data: bool) -> None:
    cluster_2.run(write_in_place, case_of(), "fresh views", through_data)


def write_some_rows_late(case: Case) -> None:
    """Whoever kept a state dict writes one row, steps later; the other hot rows do not go back."""
    plain = without_hot_rows(case)
    models = {each: sharded(each) for each in (case, plain)}
    kept = {each: tensors(model)[0] for each, model in models.items()}
    for step in range(case.steps):
        for each, model in models.items():
            if step == 3:
                kept[each][1] = 7.0
            train_step(each, model, step)
    got, want = models.values()
    same(got.state_dict(), want.state_dict())


def test_writing_into_an_old_state_dict_counts_for_what_was_written(cluster_2: Cluster) -> None:
    cluster_2.run(write_some_rows_late, case_of())


def save_and_load(case: Case, folder: str) -> None:
    """torch.distributed.checkpoint writes into the tensors of a state dict."""
    run = unsharded_run(case, dist.get_world_size())
    model = sharded(case)
    outputs = [train_step(case, model, step) for step in range(3)]

    def state() -> dict[str, Any]:
        return {"model": model.state_dict(), "optimizer": model.fused_optimizer.state_dict()}

    save(state(), checkpoint_id=folder)
    for step in range(3, 6):  # to be undone
        train_step(case, model, step)
    load(state(), checkpoint_id=folder)
    outputs += [train_step(case, model, step) for step in range(3, 6)]
    check(case, run, outputs, model)


def test_a_checkpoint_that_is_loaded_in_place_counts(cluster_2: Cluster, tmp_path: Any) -> None:
    cluster_2.run(save_and_load, case_of(), str(tmp_path))


def load_a_part(case: Case, loaded: str) -> None:
    """What a load leaves alone goes on as it was: other tables, and optimizer state."""
    models = {each: sharded(each) for each in (case, without_hot_rows(case))}
    for each, model in models.items():
        state = model.state_dict()  # not after training, which would bring the tables up to date
        names = [k for k in state if loaded == "weights" or k.endswith("a.weight")]
        ones = {k: torch.ones(state[k].size()) for k in names}
        for step in range(3):
            train_step(each, model, step)
        model.load_state_dict(ones, strict=False)
        for step in range(3, case.steps):
            train_step(each, model, step)
    same_on_all_ranks(replica_bits(models[case]))
    got, want = models.values()
    same(got.state_dict(), want.state_dict())
    same(got.fused_optimizer.state_dict()["state"], want.fused_optimizer.state_dict()["state"])


@pytest.mark.parametrize("loaded", ["one table", "weights"])
def test_a_load_of_a_part_leaves_the_rest_alone(cluster_2: Cluster, loaded: str) -> None:
    cluster_2.run(load_a_part, case_of(), loaded)


def memory_of_replicas(case: Case) -> None:
    model, plain = sharded(case), sharded(without_hot_rows(case))
    for each in (model, plain):
        train_step(case, each, 0)
    assert {n for n, _ in model.named_buffers()} == {n for n, _ in plain.named_buffers()}
    assert {n for n, _ in model.named_parameters()} == {n for n, _ in plain.named_parameters()}
    # (5 rows of 8 and 3 of 16) * (weights and state) * 4 bytes
    assert hot_rows(model).bytes == (5 * 8 + 3 * 16) * 2 * 4


def test_replicas_are_neither_parameters_nor_buffers(cluster_2: Cluster) -> None:
    cluster_2.run(memory_of_replicas, case_of())
