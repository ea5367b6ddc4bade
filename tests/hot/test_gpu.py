"""Hot rows on CUDA; skipped without a GPU."""

import pytest
import torch

import fusedrec_torchrec as fr
from fusedrec_torchrec.core import gpu
from tests.case import Case, Table, local_device, sharded
from tests.cluster import Cluster
from tests.hot.replicas import hot_rows, replica_bits, same_on_all_ranks
from tests.parity import train_step

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA"),
]

TABLES = (
    Table("a", 50, dim=8, hot=(0, 1, 2, 25, 49)),
    Table("b", 33, dim=16, hot=(0, 1, 20)),
    Table("c", 20, dim=8),
)


def load_what_codecs_have_left(case: Case) -> None:
    """State is loaded from wherever it is, by the rank that saved it and by others."""
    model = sharded(case)
    for step in range(case.steps):
        train_step(case, model, step)
    hot = hot_rows(model)
    saved = {key: value.clone() for key, value in hot.state().items()}
    left = [key for key in saved if key.endswith(".left")]
    assert any(saved[key].abs().sum() > 0 for key in left)
    for device in (torch.device("cpu"), local_device(case)):
        states = [{key: value.to(device) for key, value in saved.items()}]
        hot.load(states, own=True)
        assert all(torch.equal(hot.state()[key], saved[key]) for key in saved)
        hot.load(states * hot._pg.size(), own=False)
        for key in left:
            torch.testing.assert_close(hot.state()[key], saved[key])


@pytest.mark.parametrize(
    "codec", [fr.CodecOptions(type="int8"), fr.CodecOptions(type="dct", density=0.25)], ids=str
)
def test_what_codecs_have_left_is_loaded_on_any_device(
    gpu_cluster: Cluster, codec: fr.CodecOptions
) -> None:
    case = Case(
        tables=TABLES,
        batch_sizes=(5, 5)[: gpu_cluster.world_size],
        integers=False,
        device="cuda",
        hot_options=fr.HotOptions(codec=codec),
    )
    gpu_cluster.run(load_what_codecs_have_left, case)


def count_rows(case: Case) -> None:
    model = sharded(case)
    for step in range(3):
        train_step(case, model, step)
    hot = hot_rows(model)
    assert hot._adaptation is not None
    keys, counts = hot._adaptation._hitters.content()
    assert keys.numel() > 0 and int(keys.max()) < hot._layout.key_space
    assert int(counts.max()) <= 3  # a row counts once in a batch


def test_padding_of_unique_keys_is_not_counted(gpu_cluster: Cluster) -> None:
    adapt = fr.AdaptOptions(every=100, sample=1)
    case = Case(
        tables=TABLES,
        batch_sizes=(5, 5)[: gpu_cluster.world_size],
        device="cuda",
        hot_options=fr.HotOptions(adapt=adapt),
    )
    gpu_cluster.run(count_rows, case)


def with_and_without_kernels(case: Case) -> None:
    """Trains twice; replicas are the same on all ranks, and the same without kernels."""
    models, available = [], gpu.available
    for has_kernels in (True, False):
        gpu.available = available if has_kernels else lambda: False
        try:
            models.append(sharded(case))
            for step in range(case.steps):
                train_step(case, models[-1], step)
            fr.reconcile(models[-1])
            same_on_all_ranks(replica_bits(models[-1]))
        finally:
            gpu.available = available
    for got, want in zip(*(hot_rows(model)._replicas for model in models), strict=True):
        for one, other in zip(got.tensors, want.tensors, strict=True):
            torch.testing.assert_close(one, other)


@pytest.mark.parametrize("optimizer", ["sgd", "rowwise_adagrad"])
@pytest.mark.parametrize(
    "options",
    [
        fr.HotOptions(),
        fr.HotOptions(hot_batches=True),
        fr.HotOptions(sync_every=2),
        fr.HotOptions(sync_every=3),
        fr.HotOptions(codec=fr.CodecOptions(type="fp16")),
        fr.HotOptions(codec=fr.CodecOptions(type="dct", density=0.25)),
    ],
    ids=["plain", "hot_batches", "every 2", "every 3", "fp16", "dct"],
)
@pytest.mark.parametrize("batch", [5, 200], ids=["by place", "all places"])
def test_kernels_update_replicas_as_torch_does(
    gpu_cluster: Cluster, options: fr.HotOptions, optimizer: str, batch: int
) -> None:
    case = Case(
        tables=TABLES,
        batch_sizes=(batch, batch)[: gpu_cluster.world_size],
        optimizer=optimizer,
        integers=False,
        steps=5,
        device="cuda",
        hot_options=options,
    )
    gpu_cluster.run(with_and_without_kernels, case)
