"""CUDA and NCCL, and tables in host memory; skipped without a GPU."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

import fusedrec_torchrec as fr
from fusedrec_torchrec.core.gpu import segments
from tests.case import Case, Table, batch, local_device, sharded
from tests.cluster import Cluster
from tests.hot.replicas import train_and_compare
from tests.parity import run_and_check, train_step
from tests.sharding.modules.test_bad_input import (
    Spoil,
    error_of,
    inverse_index_too_large,
    lengths_too_small,
    missing_feature,
    negative_length,
    rebuilt,
    spoil_and_go_on,
    stale_length_per_key,
    tables_of,
    too_large,
)
from tests.sharding.modules.test_codecs import train_within
from tests.sharding.modules.test_pipelines import compare, pipelined

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA"),
]

TABLES = (Table("a", 500, dim=8, pooling="mean"), Table("b", 330, dim=16), Table("c", 70, dim=8))


@pytest.mark.parametrize("kernel", ["fused", "fused_uvm", "fused_uvm_caching"])
@pytest.mark.parametrize("optimizer", ["sgd", "adagrad", "rowwise_adagrad"])
@pytest.mark.parametrize("kind", ["ebc", "ec"])
def test_training_equals_unsharded(
    gpu_cluster: Cluster, kernel: str, optimizer: str, kind: str
) -> None:
    case = Case(
        tables=tuple(
            dataclasses.replace(t, kernel=kernel, dim=8 if kind == "ec" else t.dim) for t in TABLES
        ),
        batch_sizes=(7, 5)[: gpu_cluster.world_size],
        kind=kind,
        optimizer=optimizer,
        integers=False,
        device="cuda",
    )
    gpu_cluster.run(run_and_check, case)


def test_tables_in_device_and_in_host_memory_in_one_module(gpu_cluster: Cluster) -> None:
    kernels = ("fused", "fused_uvm", "fused_uvm_caching")
    case = Case(
        tables=tuple(
            dataclasses.replace(t, kernel=kernel) for t, kernel in zip(TABLES, kernels, strict=True)
        ),
        batch_sizes=(7, 5)[: gpu_cluster.world_size],
        device="cuda",
    )
    gpu_cluster.run(run_and_check, case)


@pytest.mark.parametrize("vbe", [False, True])
@pytest.mark.parametrize("weighted", [False, True])
def test_weighted_and_variable_batches(gpu_cluster: Cluster, vbe: bool, weighted: bool) -> None:
    case = Case(
        tables=tuple(Table(t.name, t.rows, t.dim) for t in TABLES),
        batch_sizes=(7, 5)[: gpu_cluster.world_size],
        vbe=vbe,
        weighted=weighted,
        integers=False,
        device="cuda",
    )
    gpu_cluster.run(run_and_check, case)


@pytest.mark.parametrize(
    "settings",
    [
        {"output_dtype": "fp16"},
        {"length_dtype": "int64", "id_dtype": "int32"},
        {"lengths": (0,)},
        {"lengths": (0, 90), "integers": False},
        {"batch_sizes": (0, 5)},
    ],
    ids=str,
)
def test_bags_of_all_slots_at_once(gpu_cluster: Cluster, settings: dict[str, Any]) -> None:
    """What the kernels of ``core/gpu/slot_sums.py`` meet; slots are not in the batch's order."""
    case = Case(tables=TABLES, batch_sizes=(7, 5), device="cuda")
    gpu_cluster.run(run_and_check, dataclasses.replace(case, **settings))


@pytest.mark.parametrize(("forward", "backward"), [("int8", "fp16"), ("bf16", "int8")])
def test_codecs_of_numbers(gpu_cluster: Cluster, forward: str, backward: str) -> None:
    case = Case(tables=TABLES, batch_sizes=(7, 5), integers=False, device="cuda")
    gpu_cluster.run(train_within, case, forward, backward)


def test_half_precision_tables(gpu_cluster: Cluster) -> None:
    case = Case(
        tables=tuple(dataclasses.replace(t, dtype="fp16", pooling="sum") for t in TABLES),
        batch_sizes=(7, 5),
        device="cuda",
    )
    gpu_cluster.run(run_and_check, case)


def trains_as_stock(case: Case) -> None:
    """Optimizers that only CUDA has, against TorchRec's row-wise sharding."""
    ours, stock = sharded(case), sharded(case.only("row_wise"))
    for step in range(case.steps):
        got, want = train_step(case, ours, step), train_step(case, stock, step)
        for name in want:
            torch.testing.assert_close(got[name], want[name], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("optimizer", ["adam", "partial_rowwise_adam", "lamb"])
def test_optimizers_of_cuda_only(gpu_cluster: Cluster, optimizer: str) -> None:
    case = Case(
        tables=tuple(Table(t.name, t.rows, t.dim) for t in TABLES),
        batch_sizes=(6, 6)[: gpu_cluster.world_size],
        optimizer=optimizer,
        integers=False,
        device="cuda",
    )
    gpu_cluster.run(trains_as_stock, case)


@pytest.mark.parametrize(
    "name",
    ["TrainPipelineSparseDist", "TrainPipelineFusedSparseDist", "TrainPipelineSparseDistLite"],
)
def test_pipelines_with_streams(gpu_cluster: Cluster, name: str) -> None:
    case = Case(
        tables=TABLES,
        batch_sizes=(6, 6)[: gpu_cluster.world_size],
        optimizer="rowwise_adagrad",
        integers=False,
        device="cuda",
    )
    gpu_cluster.run(compare, case, name)


def test_prefetching_pipeline(gpu_cluster: Cluster) -> None:
    case = Case(
        tables=tuple(dataclasses.replace(t, kernel="fused_uvm_caching") for t in TABLES),
        batch_sizes=(6, 6)[: gpu_cluster.world_size],
        optimizer="rowwise_adagrad",
        integers=False,
        settings=(("prefetch_pipeline", True),),
        device="cuda",
    )
    gpu_cluster.run(compare, case, "PrefetchTrainPipelineSparseDist")


def refuse_to_prefetch(case: Case) -> None:
    with pytest.raises(ValueError, match=r"fused_params\['prefetch_pipeline'\] is False, must be"):
        pipelined(case, "PrefetchTrainPipelineSparseDist")


def test_prefetching_pipeline_without_the_setting_is_refused(gpu_cluster: Cluster) -> None:
    case = Case(
        tables=tuple(dataclasses.replace(t, kernel="fused_uvm_caching") for t in TABLES),
        batch_sizes=(6, 6)[: gpu_cluster.world_size],
        device="cuda",
    )
    gpu_cluster.run(refuse_to_prefetch, case)


def refuse_lars(case: Case) -> None:
    with pytest.raises(ValueError, match="optimizer is 'lars_sgd', must be one of"):
        sharded(case)


def test_an_optimizer_that_fbgemm_only_has_a_name_for_is_refused(gpu_cluster: Cluster) -> None:
    lars = (("optimizer", EmbOptimType.LARS_SGD),)
    case = Case(
        tables=TABLES, batch_sizes=(1, 1)[: gpu_cluster.world_size], settings=lars, device="cuda"
    )
    gpu_cluster.run(refuse_lars, case)


def on_the_other_gpu(features: KeyedJaggedTensor) -> object:
    return features.to(torch.device("cuda", 1 - dist.get_rank()))


def lengths_on_the_other_gpu(features: KeyedJaggedTensor) -> object:
    return rebuilt(features, lengths=features.lengths().to(f"cuda:{1 - dist.get_rank()}"))


def lengths_on_cpu(features: KeyedJaggedTensor) -> object:
    return rebuilt(features, lengths=features.lengths().cpu())


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("stock", [False, True])
@pytest.mark.parametrize(
    ("spoil", "text"),
    [
        (on_the_other_gpu, "ids are on cuda:0"),
        (lengths_on_the_other_gpu, "lengths are on cuda:0"),
        (lengths_on_cpu, "lengths are on cpu"),
    ],
)
def test_batch_on_another_device(
    gpu_cluster: Cluster, spoil: Spoil, text: str, stock: bool
) -> None:
    tables = [Table("a", 50, dim=8), Table("b", 30, dim=16)]
    if stock:
        tables[1] = dataclasses.replace(tables[1], sharding="row_wise")
    case = Case(tables=tuple(tables), batch_sizes=(6, 6), lengths=(1, 2), device="cuda")
    texts = gpu_cluster.run(spoil_and_go_on, case, spoil, bad_ranks=(1,), first=1)
    assert set(texts) == {f"bad input on rank 1: {text}, must be on cuda:1"}


@pytest.mark.parametrize(
    ("kind", "vbe", "stock"),
    [
        # Not row-wise tables and variable batches: FBGEMM refuses to look up nothing at all.
        *(("ebc", True, stock) for stock in ("table_wise", "column_wise")),
        *(("ebc", False, stock) for stock in ("row_wise", "table_wise", "column_wise")),
        *(("ec", False, stock) for stock in ("row_wise", "table_wise", "column_wise")),
    ],
)
def test_batches_of_no_samples_beside_stock_tables(
    gpu_cluster: Cluster, kind: str, vbe: bool, stock: str
) -> None:
    case = Case(
        tables=(Table("a", 50, dim=8), Table("b", 30, dim=8, sharding=stock)),
        # TorchRec reduces bags of row-wise tables for batches of one size only.
        batch_sizes=(0, 0) if (kind, stock) == ("ebc", "row_wise") else (0, 4),
        kind=kind,
        vbe=vbe,
        device="cuda",
    )
    if gpu_cluster.world_size == 1:
        case = dataclasses.replace(case, batch_sizes=(0,))
    gpu_cluster.run(run_and_check, case)


def negative_inverse_index(features: KeyedJaggedTensor) -> object:
    names, indices = features.inverse_indices()
    return rebuilt(features, inverse_indices=(names, indices - 100))


def no_bags_for_samples(features: KeyedJaggedTensor) -> object:
    """Samples of a feature that has no bags."""
    (_, *strides), lengths = features.stride_per_key_per_rank(), features.lengths()
    first = features.stride_per_key()[0]
    return rebuilt(
        features,
        values=features.values()[int(lengths[:first].sum()) :],
        lengths=lengths[first:],
        stride_per_key_per_rank=[[0], *strides],
    )


def one_length_too_large(features: KeyedJaggedTensor) -> object:
    """And another one negative, so that they add up."""
    lengths = features.lengths().clone()
    lengths[0] += 1000
    lengths[-1] -= 1000
    return rebuilt(features, lengths=lengths)


def all_ids_in_every_other_bag(features: KeyedJaggedTensor) -> object:
    ids, lengths = features.values().numel(), features.lengths().clone()
    lengths[::2], lengths[1::2] = ids, -ids
    return rebuilt(features, lengths=lengths)


def spoil_without_kernels(*args: Any, **kwargs: Any) -> str:
    """Torch's own operators do it, where sums are to be the same in every run."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        return spoil_and_go_on(*args, **kwargs)
    finally:
        torch.use_deterministic_algorithms(False)


def ids_twice(features: KeyedJaggedTensor) -> object:
    return rebuilt(
        features,
        values=features.values().repeat_interleave(2),
        lengths=features.lengths() * 2,
    )


def with_few_ids(*args: Any, most: int, **kwargs: Any) -> str:
    """Lets kernels count no more ids than these, and trains."""
    with mock.patch.object(segments, "MOST_IDS", most):
        return spoil_and_go_on(*args, **kwargs)


def check_bad_batch(
    cluster: Cluster,
    case: Case,
    spoil: Spoil,
    text: str,
    kernels: bool = True,
    run: Callable[..., str] | None = None,
) -> None:
    last = cluster.world_size - 1
    case = dataclasses.replace(case, batch_sizes=case.batch_sizes[: last + 1], device="cuda")
    run = run or (spoil_and_go_on if kernels else spoil_without_kernels)
    texts = cluster.run(run, case, spoil, bad_ranks=(last,), first=1)
    assert len(set(texts)) == 1
    assert texts[0].startswith(f"bad input on rank {last}: {text}")


BAD_LENGTHS: dict[Spoil, str] = {
    negative_length: "lengths[0] is -1, must be at least 0",
    one_length_too_large: "lengths[11] is -99",
    all_ids_in_every_other_bag: "lengths[1] is -",
    lengths_too_small: "lengths add up to",
    stale_length_per_key: "length_per_key is [",
}
BAD_PICKS: dict[Spoil, str] = {
    inverse_index_too_large: "inverse index 10",
    negative_inverse_index: "inverse index -",
    no_bags_for_samples: "inverse_indices have 6 samples, must have none: feature 'f_a'",
}


@pytest.mark.parametrize("kernels", [True, False])
@pytest.mark.parametrize(
    ("spoil", "text"),
    [(too_large, "feature 'f_b'"), (missing_feature, "feature 'f_b'"), *BAD_LENGTHS.items()],
)
def test_bad_batch(gpu_cluster: Cluster, spoil: Spoil, text: str, kernels: bool) -> None:
    tables = (Table("a", 50, dim=8), Table("b", 30, dim=16))
    case = Case(tables=tables, batch_sizes=(6, 6), lengths=(1, 2))
    check_bad_batch(gpu_cluster, case, spoil, text, kernels)


@pytest.mark.parametrize("kernels", [True, False])
@pytest.mark.parametrize(("spoil", "text"), [(too_large, "feature 'f_b'"), *BAD_PICKS.items()])
@pytest.mark.parametrize("kind", ["ebc", "ec"])
def test_bad_batch_with_a_variable_batch_per_feature(
    gpu_cluster: Cluster, kind: str, spoil: Spoil, text: str, kernels: bool
) -> None:
    case = Case(
        tables=(Table("a", 50, dim=8), Table("b", 30, dim=8)),
        batch_sizes=(6, 6),
        lengths=(1, 2),
        vbe=True,
        kind=kind,
    )
    check_bad_batch(gpu_cluster, case, spoil, text, kernels)


def test_too_many_ids(gpu_cluster: Cluster) -> None:
    case = Case(tables=(Table("a", 50), Table("b", 30)), batch_sizes=(6, 6), lengths=(1, 2))
    run = functools.partial(with_few_ids, most=24)
    check_bad_batch(gpu_cluster, case, ids_twice, "the batch has ", run=run)


@pytest.mark.parametrize("types", ["tables", "rows and columns"])
@pytest.mark.parametrize(("spoil", "text"), BAD_LENGTHS.items())
def test_bad_lengths_where_owners_pool(
    gpu_cluster: Cluster, types: str, spoil: Spoil, text: str
) -> None:
    case = Case(tables=tables_of(types), batch_sizes=(6, 6), lengths=(1, 2))
    check_bad_batch(gpu_cluster, case, spoil, text)


@pytest.mark.parametrize(("spoil", "text"), BAD_LENGTHS.items())
@pytest.mark.parametrize("kind", ["ebc", "ec"])
def test_bad_lengths_beside_stock_tables(
    gpu_cluster: Cluster, kind: str, spoil: Spoil, text: str
) -> None:
    """TorchRec's own kernels do not look at lengths before they use them."""
    tables = (Table("a", 50, dim=8), Table("b", 30, dim=8, sharding="row_wise"))
    case = Case(tables=tables, batch_sizes=(6, 6), lengths=(1, 2), kind=kind)
    check_bad_batch(gpu_cluster, case, spoil, text)


def only_spoil(case: Case, spoil: Spoil, bad_ranks: tuple[int, ...], first: int) -> str:
    """No training: FBGEMM's way back of picked sequences is not emulated."""
    model, rank = sharded(case), dist.get_rank()
    features = batch(case, first, rank).to(local_device(case))
    return error_of(model, spoil(features) if rank in bad_ranks else features)


def test_bad_picks_beside_stock_tables(gpu_cluster: Cluster) -> None:
    tables = (Table("a", 50, dim=8), Table("b", 30, dim=8, sharding="table_wise"))
    case = Case(tables=tables, batch_sizes=(6, 6), lengths=(1, 2), kind="ec", vbe=True)
    for spoil, text in BAD_PICKS.items():
        check_bad_batch(gpu_cluster, case, spoil, text, run=only_spoil)


@pytest.mark.parametrize("kernel", ["fused", "fused_uvm_caching"])
@pytest.mark.parametrize("optimizer", ["sgd", "adagrad", "rowwise_adagrad"])
@pytest.mark.parametrize("kind", ["ebc", "ec"])
def test_hot_rows_in_device_memory(
    gpu_cluster: Cluster, kernel: str, optimizer: str, kind: str
) -> None:
    case = Case(
        tables=tuple(
            dataclasses.replace(
                t, kernel=kernel, dim=8 if kind == "ec" else t.dim, hot=tuple(range(0, t.rows, 7))
            )
            for t in TABLES
        ),
        batch_sizes=(7, 5)[: gpu_cluster.world_size],
        kind=kind,
        optimizer=optimizer,
        device="cuda",
        hot_options=fr.HotOptions(adapt=fr.AdaptOptions(every=2, sample=1)),
    )
    gpu_cluster.run(train_and_compare, case)
