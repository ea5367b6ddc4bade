"""Feature-processed EmbeddingBagCollection: position weights are applied on the requester."""

import dataclasses
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder

import fusedrec_torchrec as fr
from tests.case import (
    Case,
    Table,
    batch,
    coefficients,
    local_device,
    outputs_by_name,
    sharded,
    unsharded,
)
from tests.cluster import Cluster
from tests.parity import check, train_step
from tests.reference import unsharded_run

TABLES = (
    Table("a", 50, features=("x", "y")),
    Table("b", 33, dim=16, features=("y", "z")),
)


def position_weights(feature: str) -> torch.Tensor:
    return torch.tensor([1.0, 2.0, 3.0, 1.0]) + len(feature)


def set_position_weights(module: torch.nn.Module) -> None:
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            if "position_weights" in name:
                parameter.copy_(position_weights(name.rpartition(".")[2]))


def train_and_compare(
    case: Case, change: Callable[[torch.nn.Module], None] = lambda _: None
) -> None:
    """Tables train; position weights stay, but their gradients are compared."""
    world_size, rank = dist.get_world_size(), dist.get_rank()
    model = sharded(case)
    change(model)
    set_position_weights(model)
    reference = unsharded(case, "cpu")
    set_position_weights(reference)
    run = unsharded_run(case, world_size, module=reference)
    outputs = [train_step(case, model, step) for step in range(case.steps)]
    check(case, run, outputs, model)

    # Gradients of the position weights, averaged over ranks by DDP: one step from equal tables.
    gradients = {n: p for n, p in model.named_parameters() if "position_weights" in n}
    assert gradients
    assert any(isinstance(m, DistributedDataParallel) for m in model.modules())
    for parameter in (*gradients.values(), *reference.parameters()):
        parameter.grad = None
    loss = torch.zeros(())
    for r in range(world_size):
        for name, out in outputs_by_name(reference(batch(case, 0, r))).items():
            loss = loss + (out * coefficients(case, 0, r, name, out)).sum()
    (loss / world_size).backward()
    train_step(case, model, 0)
    wanted = {
        n.rpartition(".")[2]: p.grad for n, p in reference.named_parameters() if "position" in n
    }
    for name, parameter in gradients.items():
        assert parameter.grad is not None, f"rank {rank}: no gradient for {name}"
        torch.testing.assert_close(parameter.grad.cpu(), wanted[name.rpartition(".")[2]])


def test_training_equals_unsharded(cluster_2: Cluster) -> None:
    cluster_2.run(train_and_compare, Case(tables=TABLES, batch_sizes=(5, 5), kind="fp_ebc"))


def test_with_uneven_batches_and_rowwise_adagrad(cluster_2: Cluster) -> None:
    case = Case(
        tables=TABLES,
        batch_sizes=(5, 3),
        kind="fp_ebc",
        optimizer="rowwise_adagrad",
        integers=False,
    )
    cluster_2.run(train_and_compare, case)


def test_table_wise_tables_beside_fused_ones(cluster_2: Cluster) -> None:
    tables = (*TABLES, Table("t", 20, sharding="table_wise"))
    cluster_2.run(train_and_compare, Case(tables=tables, batch_sizes=(5, 5), kind="fp_ebc"))


def too_many_positions(case: Case) -> str:
    model, rank = sharded(case), dist.get_rank()
    long = dataclasses.replace(case, lengths=(5,) if rank else case.lengths)
    try:
        model(batch(long, 0, rank).to(local_device(case)))
    except ValueError as error:
        train_step(case, model, 0)  # and on
        return str(error)
    raise AssertionError("no error")


def test_more_ids_than_position_weights(cluster_2: Cluster) -> None:
    case = Case(tables=TABLES, batch_sizes=(5, 5), kind="fp_ebc")
    texts = cluster_2.run(too_many_positions, case)
    want = (
        "feature 'x': a sample has 5 ids, must have at most 4, the number of its position weights"
    )
    assert texts == [f"bad input on rank 1: {want}"] * 2


def test_stock_sharder_of_tables_is_refused() -> None:
    with pytest.raises(ValueError, match="ebc_sharder is a EmbeddingBagCollectionSharder, must be"):
        fr.FusedFeatureProcessedEmbeddingBagCollectionSharder(EmbeddingBagCollectionSharder())
