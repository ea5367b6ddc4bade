"""TorchRec's training pipeline syncs the groups by itself, as the plain loop does."""

import dataclasses
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torchrec.distributed.train_pipeline.train_pipelines import TrainPipelineSparseDist

import fusedrec_torchrec as fr
from tests.case import Case, local_device
from tests.cluster import Cluster
from tests.modules.test_pipelines import STEPS, Batch, batches, build, on_device, snapshot
from tests.modules.test_pipelines import case_of as one_dimensional


def case_of(kind: str, **options: Any) -> Case:
    case = one_dimensional(kind)
    if options.get("sync") == "gradients":
        tables = tuple(dataclasses.replace(t, sharding="fused_row_wise") for t in case.tables)
        case = dataclasses.replace(case, tables=tables)
    grid = fr.GridOptions(sharding_group_size=2, **options)
    return dataclasses.replace(case, batch_sizes=(6,) * 4, grid=grid)


def compare(case: Case) -> None:
    """Bit for bit, outputs and state."""
    model: Any = build(case)
    wanted = []
    for item in on_device(case):
        model.fused_optimizer.zero_grad()
        loss, output = model(item)
        loss.backward()
        model.fused_optimizer.step()
        model.sync()
        wanted.append(output)
    other = build(case)
    pipeline: Any = TrainPipelineSparseDist(other, other.fused_optimizer, local_device(case))
    iterator, got = batches(case), []
    while True:
        try:
            got.append(pipeline.progress(iterator))
        except StopIteration:
            break
    assert len(got) == STEPS
    assert all(torch.equal(a, b) for a, b in zip(got, wanted, strict=True))
    for mine, theirs in zip(snapshot(other), snapshot(model), strict=True):
        assert torch.equal(mine, theirs)


@pytest.mark.parametrize(
    "kind",
    [
        "ebc",
        pytest.param("ec", marks=pytest.mark.slow),
        pytest.param("fp_ebc", marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"sync_every": 3},
        {"overlap": "until_lookup"},
        {"overlap": "one_step"},
        {"sync": "gradients"},
    ],
    ids=["every step", "every 3 steps", "until_lookup", "one_step", "gradients"],
)
def test_pipeline_equals_plain_loop(cluster_4: Cluster, kind: str, options: dict[str, Any]) -> None:
    cluster_4.run(compare, case_of(kind, **options))


def bad_batch(case: Case) -> tuple[int, str]:
    """Steps before the error, and its text."""
    model = build(case)
    pipeline: Any = TrainPipelineSparseDist(model, model.fused_optimizer, local_device(case))

    def with_one_bad() -> Iterator[Batch]:
        for step, item in enumerate(batches(case)):
            if step == 4 and dist.get_rank() == 1:
                item.features.values()[0] = 10**6
            yield item

    iterator, steps = with_one_bad(), 0
    try:
        while True:
            pipeline.progress(iterator)
            steps += 1
    except ValueError as error:
        text = str(error)
    total = torch.ones(1)
    dist.all_reduce(total)
    return steps, text


@pytest.mark.parametrize("kind", ["ebc", pytest.param("ec", marks=pytest.mark.slow)])
@pytest.mark.parametrize("sync", ["weights", "gradients"])
def test_a_bad_batch_in_one_group_is_an_error_in_all(
    cluster_4: Cluster, kind: str, sync: str
) -> None:
    found = cluster_4.run(bad_batch, case_of(kind, sync=sync))
    assert len(set(found)) == 1
    steps, text = found[0]
    assert steps <= 4
    assert text.startswith("bad input on rank 1: feature 'f_a' of table 'a': id 1000000 ")
