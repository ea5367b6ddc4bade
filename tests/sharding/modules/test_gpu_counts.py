"""Batches whose ids nobody counts on the host, on CUDA; skipped without a GPU."""

import dataclasses
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torchrec.modules.feature_processor_ import PositionWeightedModuleCollection

from tests.case import Case, Table, batch, local_device, sharded
from tests.cluster import Cluster
from tests.parity import run_and_check
from tests.sharding.modules import test_feature_processors as processed
from tests.sharding.modules.test_bad_input import (
    Spoil,
    in_changing_order,
    lengths_too_small,
    negative_length,
    spoil_and_go_on,
    too_large,
    with_extra_feature,
)
from tests.sharding.modules.test_owner_pooling import MIX, SHARED_FEATURES, SUMS, only
from tests.sharding.modules.test_pipelines import compare
from tests.sharding.modules.test_requester_pooling import gradients_of_weights

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA"),
]

TWO = (Table("a", 50, dim=8), Table("b", 30, dim=8))
SHARED = only("fused_row_wise", SHARED_FEATURES)


def on_gpus(cluster: Cluster, **settings: Any) -> Case:
    sizes = settings.pop("batch_sizes", (7, 5))[: cluster.world_size]
    return Case(**{"tables": TWO, "batch_sizes": sizes, "device": "cuda", **settings})


def of_kind(tables: tuple[Table, ...], kind: str) -> tuple[Table, ...]:
    """The tables for a kind of module: sequences have one dimension."""
    if kind != "ec":
        return tables
    return tuple(dataclasses.replace(t, dim=8, pooling="sum") for t in tables)


@pytest.mark.parametrize("vbe", [False, True])
@pytest.mark.parametrize("kind", ["ebc", "ec"])
def test_features_of_several_tables(gpu_cluster: Cluster, kind: str, vbe: bool) -> None:
    case = on_gpus(gpu_cluster, tables=of_kind(SHARED, kind), kind=kind, vbe=vbe)
    gpu_cluster.run(run_and_check, case)


@pytest.mark.parametrize("kind", ["ebc", "ec"])
def test_weights_that_do_not_count_and_other_types(gpu_cluster: Cluster, kind: str) -> None:
    case = on_gpus(
        gpu_cluster,
        tables=of_kind(SHARED, kind),
        kind=kind,
        length_dtype="int64",
        id_dtype="int32",
        integers=False,
    )
    gpu_cluster.run(run_and_check, case)


@pytest.mark.parametrize("sizes", [(0, 4), (0, 0)])
@pytest.mark.parametrize(("kind", "vbe"), [("ebc", False), ("ebc", True), ("ec", False)])
def test_no_samples(gpu_cluster: Cluster, kind: str, vbe: bool, sizes: tuple[int, int]) -> None:
    tables = of_kind(SHARED, kind)
    case = on_gpus(gpu_cluster, tables=tables, kind=kind, vbe=vbe, batch_sizes=sizes)
    gpu_cluster.run(run_and_check, case)


@pytest.mark.parametrize("kind", ["ebc", "ec"])
def test_features_of_no_table_and_in_changing_order(gpu_cluster: Cluster, kind: str) -> None:
    gpu_cluster.run(with_extra_feature, on_gpus(gpu_cluster, kind=kind))
    gpu_cluster.run(in_changing_order, on_gpus(gpu_cluster, kind=kind))


def test_order_changes_with_tables_that_owners_pool(gpu_cluster: Cluster) -> None:
    tables = (TWO[0], dataclasses.replace(TWO[1], sharding="fused_table_wise"))
    gpu_cluster.run(with_extra_feature, on_gpus(gpu_cluster, tables=tables))
    gpu_cluster.run(in_changing_order, on_gpus(gpu_cluster, tables=tables))


@pytest.mark.parametrize("vbe", [False, True])
def test_sequences_in_several_buckets(gpu_cluster: Cluster, vbe: bool) -> None:
    """Tables in different memory do not share a bucket; slots are not in the batch's order."""
    kernels = ("fused", "fused_uvm", "fused")
    tables = tuple(
        Table(name, rows, kernel=kernel)
        for (name, rows), kernel in zip((("a", 500), ("b", 330), ("c", 70)), kernels, strict=True)
    )
    case = on_gpus(gpu_cluster, tables=tables, kind="ec", vbe=vbe, optimizer="adagrad")
    gpu_cluster.run(run_and_check, case)


@pytest.mark.parametrize("tables", [only("fused_row_wise", SUMS), SHARED], ids=["own", "shared"])
@pytest.mark.parametrize("extra", [False, True])
def test_gradients_of_weights(gpu_cluster: Cluster, tables: tuple[Table, ...], extra: bool) -> None:
    case = on_gpus(
        gpu_cluster,
        tables=tuple(dataclasses.replace(t, pooling="sum") for t in tables),
        batch_sizes=(16, 12),
        lengths=(2, 4, 8),
        weighted=True,
        integers=False,
    )
    gpu_cluster.run(gradients_of_weights, case, extra)


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"batch_sizes": (5, 3), "optimizer": "rowwise_adagrad", "integers": False},
        {"tables": (*processed.TABLES, Table("t", 20, sharding="table_wise"))},
    ],
    ids=str,
)
def test_learned_position_weights(gpu_cluster: Cluster, settings: dict[str, Any]) -> None:
    given = {"tables": processed.TABLES, "batch_sizes": (5, 5), "kind": "fp_ebc"}
    gpu_cluster.run(processed.train_and_compare, on_gpus(gpu_cluster, **given | settings))


class OtherWeights(PositionWeightedModuleCollection):
    """A processor that is not known to be one of positions."""


def with_other_processors(model: torch.nn.Module) -> None:
    for module in model.modules():
        if isinstance(module, PositionWeightedModuleCollection):
            module.__class__ = OtherWeights


def test_other_processors_see_batches_that_know_their_counts(gpu_cluster: Cluster) -> None:
    case = on_gpus(gpu_cluster, tables=processed.TABLES, batch_sizes=(5, 5), kind="fp_ebc")
    gpu_cluster.run(processed.train_and_compare, case, with_other_processors)


def test_more_ids_than_position_weights(gpu_cluster: Cluster) -> None:
    case = on_gpus(gpu_cluster, tables=processed.TABLES, batch_sizes=(5, 5), kind="fp_ebc")
    texts = gpu_cluster.run(processed.too_many_positions, case)
    assert texts[0].startswith("bad input on rank 1: feature 'x': a sample has 5 ids, must have at")


@pytest.mark.parametrize(
    ("spoil", "text"),
    [
        (too_large, "feature 'f_b'"),
        (negative_length, "lengths[0] is -1, must be at least 0"),
        (lengths_too_small, "lengths"),
    ],
)
@pytest.mark.parametrize("kind", ["ec", "fp_ebc"])
def test_bad_batch(gpu_cluster: Cluster, spoil: Spoil, text: str, kind: str) -> None:
    last = gpu_cluster.world_size - 1
    case = on_gpus(gpu_cluster, batch_sizes=(6, 6), lengths=(1, 2), kind=kind)
    texts = gpu_cluster.run(spoil_and_go_on, case, spoil, bad_ranks=(last,), first=1)
    assert len(set(texts)) == 1
    assert texts[0].startswith(f"bad input on rank {last}: {text}")


@pytest.mark.parametrize("kind", ["ec", "fp_ebc"])
@pytest.mark.parametrize("name", ["TrainPipelineSparseDist", "TrainPipelineFusedSparseDist"])
def test_pipelines_with_streams(gpu_cluster: Cluster, name: str, kind: str) -> None:
    case = on_gpus(
        gpu_cluster,
        tables=of_kind(SHARED, kind),
        kind=kind,
        batch_sizes=(6, 6),
        optimizer="adagrad",
        integers=False,
    )
    gpu_cluster.run(compare, case, name)


def counts_are_known(case: Case) -> None:
    """A batch that says how many ids its features have is taken at its word, as on CPU."""
    model, rank = sharded(case), dist.get_rank()
    features = batch(case, 0, rank).to(local_device(case))
    want = model(features)
    features.length_per_key()
    got = model(features)
    assert all(torch.equal(want[name], got[name]) for name in want)


@pytest.mark.parametrize("kind", ["ebc", "ec"])
def test_batches_that_know_their_counts(gpu_cluster: Cluster, kind: str) -> None:
    tables = of_kind(MIX, kind) if kind == "ebc" else of_kind(SHARED, kind)
    gpu_cluster.run(counts_are_known, on_gpus(gpu_cluster, tables=tables, kind=kind))
