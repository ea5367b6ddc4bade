"""Tables that their owners pool, on CUDA and NCCL; skipped without a GPU."""

from typing import Any

import pytest
import torch

import fusedrec_torchrec as fr
from tests.case import Case, Table
from tests.cluster import Cluster
from tests.hot.replicas import train_and_compare
from tests.hot.test_owner_pooling import TABLES as HOT_TABLES
from tests.parity import run_and_check
from tests.sharding.modules.test_bad_input import (
    Spoil,
    lengths_too_small,
    negative,
    negative_length,
    spoil_and_go_on,
    too_large,
)
from tests.sharding.modules.test_hash_ids import compare as hashing
from tests.sharding.modules.test_owner_pooling import (
    MIX,
    SHARED_FEATURES,
    SUMS,
    VARIANTS,
    only,
    overflow_in_training,
)
from tests.sharding.modules.test_pipelines import compare

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA"),
]
BAGS = tuple(t for t in MIX if t.sharding != "fused_row_wise")


def on_gpus(cluster: Cluster, **settings: Any) -> Case:
    sizes = settings.pop("batch_sizes", (5, 4))[: cluster.world_size]
    return Case(**{"tables": MIX, "batch_sizes": sizes, "device": "cuda", **settings})


@pytest.mark.parametrize("sharding", ["fused_table_wise", "fused_column_wise"])
@pytest.mark.parametrize("integers", [False, True])
def test_training_equals_unsharded(gpu_cluster: Cluster, sharding: str, integers: bool) -> None:
    case = on_gpus(
        gpu_cluster,
        tables=only(sharding),
        optimizer="adagrad",
        integers=integers,
        repeated=True,
    )
    gpu_cluster.run(run_and_check, case)


@pytest.mark.parametrize(
    ("variant", "tables"),
    [
        ("uneven batches, exact counts", MIX),
        ("a rank without samples", BAGS),
        ("no samples", MIX),
        ("no samples", BAGS),
        ("no ids", BAGS),
        ("one id or none", BAGS),
        ("long bags", MIX),
        ("int32 ids, int64 lengths, repeated", BAGS),
        ("vbe, repeated", MIX),
        ("vbe, a rank without samples", BAGS),
    ],
)
def test_all_kinds_of_batches(
    gpu_cluster: Cluster, variant: str, tables: tuple[Table, ...]
) -> None:
    case = on_gpus(gpu_cluster, **{**VARIANTS[variant], "tables": tables})
    gpu_cluster.run(run_and_check, case)


@pytest.mark.parametrize("vbe", [False, True])
def test_weighted(gpu_cluster: Cluster, vbe: bool) -> None:
    case = on_gpus(gpu_cluster, tables=SUMS, weighted=True, vbe=vbe, repeated=True)
    gpu_cluster.run(run_and_check, case)


@pytest.mark.parametrize("vbe", [False, True])
def test_several_features_per_table_and_tables_per_feature(gpu_cluster: Cluster, vbe: bool) -> None:
    case = on_gpus(gpu_cluster, tables=SHARED_FEATURES, repeated=True, vbe=vbe)
    gpu_cluster.run(run_and_check, case)


def test_nothing_is_lost_if_every_step_overflows(gpu_cluster: Cluster) -> None:
    case = on_gpus(gpu_cluster, batch_sizes=(60, 50), integers=False, repeated=True)
    gpu_cluster.run(overflow_in_training, case)


@pytest.mark.parametrize("options", [None, fr.HotOptions(hot_batches=True)])
def test_beside_hot_rows(gpu_cluster: Cluster, options: fr.HotOptions | None) -> None:
    case = on_gpus(gpu_cluster, tables=HOT_TABLES, repeated=True, hot_options=options)
    gpu_cluster.run(train_and_compare, case)


@pytest.mark.parametrize("name", ["TrainPipelineSparseDist", "TrainPipelineFusedSparseDist"])
def test_pipelines_with_streams(gpu_cluster: Cluster, name: str) -> None:
    case = on_gpus(gpu_cluster, batch_sizes=(6, 6), optimizer="adagrad", integers=False)
    gpu_cluster.run(compare, case, name)


@pytest.mark.parametrize(
    ("spoil", "text"),
    [
        (too_large, "feature 'f_b'"),
        (negative, "feature 'f_b'"),
        (negative_length, "lengths[0] is -1, must be at least 0"),
        (lengths_too_small, "lengths"),
    ],
)
@pytest.mark.parametrize("beside_rows", [False, True])
def test_bad_batch(gpu_cluster: Cluster, spoil: Spoil, text: str, beside_rows: bool) -> None:
    last = gpu_cluster.world_size - 1
    tables = (
        Table("a", 50, dim=8, sharding="fused_row_wise" if beside_rows else "fused_table_wise"),
        Table("b", 30, dim=16, sharding="fused_column_wise"),
    )
    case = on_gpus(gpu_cluster, tables=tables, batch_sizes=(6, 6), lengths=(1, 2))
    texts = gpu_cluster.run(spoil_and_go_on, case, spoil, bad_ranks=(last,), first=1)
    assert len(set(texts)) == 1
    assert texts[0].startswith(f"bad input on rank {last}: {text}")


def test_hashing_inside_equals_hashing_outside(gpu_cluster: Cluster) -> None:
    tables = (
        Table("a", 50, sharding="fused_table_wise"),
        Table("b", 33, sharding="fused_column_wise"),
    )
    gpu_cluster.run(hashing, on_gpus(gpu_cluster, tables=tables, repeated=True), 7)
