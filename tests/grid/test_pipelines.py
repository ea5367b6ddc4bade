"""TorchRec's training pipeline syncs the groups by itself, as the plain loop does."""

import dataclasses
from typing import Any

import pytest
import torch

import fusedrec_torchrec as fr
from tests.case import Case
from tests.cluster import Cluster
from tests.sharding.modules.test_pipelines import (
    STEPS,
    bad_batch_in_pipeline,
    build,
    on_device,
    pipelined,
    snapshot,
)
from tests.sharding.modules.test_pipelines import case_of as one_dimensional

PIPELINE = "TrainPipelineSparseDist"


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
    got, states = pipelined(case, PIPELINE)
    assert len(got) == STEPS
    assert all(torch.equal(a, b) for a, b in zip(got, wanted, strict=True))
    for mine, theirs in zip(states, snapshot(model), strict=True):
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


@pytest.mark.parametrize("kind", ["ebc", pytest.param("ec", marks=pytest.mark.slow)])
@pytest.mark.parametrize("sync", ["weights", "gradients"])
def test_a_bad_batch_in_one_group_is_an_error_in_all(
    cluster_4: Cluster, kind: str, sync: str
) -> None:
    found = cluster_4.run(bad_batch_in_pipeline, case_of(kind, sync=sync), PIPELINE)
    assert len(set(found)) == 1
    steps, text = found[0]
    assert steps <= 4
    assert text.startswith("bad input on rank 1: feature 'f_a' of table 'a': id 1000000 ")
