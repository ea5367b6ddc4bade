"""Training with codecs on CUDA, against the unsharded module; skipped without a GPU."""

import dataclasses

import pytest
import torch
import torch.distributed as dist

import fusedrec_torchrec as fr
from tests.case import Case, Table, sharded
from tests.cluster import Cluster
from tests.parity import check, train_step
from tests.reference import unsharded_run
from tests.sharding.modules.test_codecs import CASES, only_the_largest, options, train_within

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA"),
]
BOTH = [("bf16", "bf16"), ("fp16", "int8"), ("int8", "fp16")]


def on_gpus(cluster: Cluster, case: Case) -> Case:
    sizes = case.batch_sizes[: cluster.world_size]
    return dataclasses.replace(case, device="cuda", batch_sizes=sizes)


@pytest.mark.parametrize(
    ("forward", "backward", "name"),
    [
        *((*both, name) for both in BOTH for name in ("ebc", "hot", "owners pool")),
        *(("int8", "int8", name) for name in ("ec", "vbe", "no samples", "owners pool weighted")),
        *((*both, "rowwise adagrad") for both in BOTH),
    ],
)
def test_training_is_off_by_no_more_than_the_codec(
    gpu_cluster: Cluster, name: str, forward: str, backward: str
) -> None:
    """Outputs, weights and optimizer state."""
    gpu_cluster.run(train_within, on_gpus(gpu_cluster, CASES[name]), forward, backward)


def dct_of_all_entries(case: Case) -> None:
    """All entries reach a threshold of zero: each goes its own way, and arrives as it was."""
    run = unsharded_run(case, dist.get_world_size())
    given = fr.Codecs(forward=fr.CodecOptions(type="dct", density=0.97, relative=False))
    model = sharded(case, options(case, given))
    for codec in model.module.sparse.fused.wires[0].codecs:
        codec.threshold.load([torch.zeros(2)])
    outputs = [train_step(case, model, step) for step in range(case.steps)]
    check(case, run, outputs, model)


@pytest.mark.parametrize("optimizer", ["sgd", "adagrad"])
@pytest.mark.parametrize("name", ["ebc", "ec", "vbe", "hot", "owners pool"])
def test_entries_find_their_places(gpu_cluster: Cluster, name: str, optimizer: str) -> None:
    case = dataclasses.replace(CASES[name], integers=True, optimizer=optimizer)
    gpu_cluster.run(dct_of_all_entries, on_gpus(gpu_cluster, case))


@pytest.mark.parametrize("values", ["fp32", "bf16"])
def test_only_the_largest_entries_travel_and_are_trained(gpu_cluster: Cluster, values: str) -> None:
    # Enough slack that no message overflows: all rows in every batch.
    case = Case((Table("a", 30, dim=16),), (60, 60), integers=False, skew=0.0, lengths=(4,))
    gpu_cluster.run(only_the_largest, on_gpus(gpu_cluster, case), 0.4, values)
