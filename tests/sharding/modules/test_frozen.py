"""Tables that are looked up but not trained: ``requires_grad = False`` before sharding."""

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torchrec.distributed.sharding_plan import construct_module_sharding_plan, table_wise
from torchrec.distributed.types import ShardingEnv
from torchrec.modules.embedding_configs import EmbeddingConfig
from torchrec.modules.embedding_modules import EmbeddingCollection

import fusedrec_torchrec as fr
from tests.case import Case, Table, batch, prefix, sharded
from tests.cluster import Cluster
from tests.parity import run_and_check

TABLES = (Table("a", 50), Table("b", 9, frozen=True), Table("c", 30, dim=16))


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"kind": "ec", "tables": (Table("a", 50), Table("b", 9, frozen=True))},
        {"weighted": True, "optimizer": "sgd"},
        {"optimizer": "adagrad", "tables": (TABLES[0], dataclasses.replace(TABLES[1], dim=16))},
        {"grid": fr.GridOptions(sharding_group_size=1)},
    ],
    ids=["ebc", "ec", "weighted", "another dimension", "2D"],
)
def test_frozen_tables_stay_and_others_train(cluster_2: Cluster, settings: dict[str, Any]) -> None:
    given = {"tables": TABLES, "batch_sizes": (6, 4), "optimizer": "rowwise_adagrad"} | settings
    if "grid" in settings:  # groups of one rank, in step by sharing the same weights at the end
        cluster_2.run(frozen_in_groups, Case(**given))
        return
    cluster_2.run(run_and_check, Case(**given))


def frozen_weights(case: Case, model: torch.nn.Module) -> dict[str, torch.Tensor]:
    state = model.state_dict()
    values = {
        t.name: state[f"sparse.{prefix(case)}.{t.name}.weight"] for t in case.tables if t.frozen
    }
    return {
        name: value.to_local().local_shards()[0].clone()
        if hasattr(value, "to_local")
        else value.local_shards()[0].tensor.clone()
        for name, value in values.items()
    }


def frozen_in_groups(case: Case) -> None:
    model = sharded(case)
    before = frozen_weights(case, model)
    for step in range(3):
        outputs = model(batch(case, step, dist.get_rank()))
        torch.cat([out.flatten() for out in outputs.values()]).sum().backward()
        model.sync()
    for name, weight in frozen_weights(case, model).items():
        assert torch.equal(weight, before[name]), name


def step_of_frozen_tables() -> tuple[bool, list[bool]]:
    """Nothing to train at all: there is no gradient, and nobody waits for one."""
    tables = tuple(dataclasses.replace(t, frozen=True) for t in TABLES)
    case = Case(tables=tables, batch_sizes=(6, 4))
    model = sharded(case)
    outputs = model(batch(case, 0, dist.get_rank()))
    parameters = [p.requires_grad for p in model.parameters()]
    return any(out.requires_grad for out in outputs.values()), parameters


def test_only_frozen_tables(cluster_2: Cluster) -> None:
    assert cluster_2.run(step_of_frozen_tables) == [(False, [False] * 3)] * 2


def error(make: Callable[[], Any]) -> str:
    try:
        make()
    except ValueError as problem:
        return str(problem)
    return "no error"


def error_of(case: Case) -> str:
    return error(lambda: sharded(case))


@pytest.mark.parametrize(
    ("table", "settings", "message"),
    [
        pytest.param(
            {"sharding": "table_wise"},
            {},
            "table 'b' has requires_grad False and is sharded table_wise, must be sharded "
            "fused_row_wise: TorchRec's shardings train a table all the same",
            id="stock",
        ),
        pytest.param(
            {"hot": (1,)}, {}, "the table has requires_grad False, must have True", id="hot"
        ),
        pytest.param(
            {},
            {"grid": fr.GridOptions(sharding_group_size=1, sync="gradients")},
            "sync is 'gradients': the table has requires_grad False, must have True",
            id="shared gradients",
        ),
    ],
)
def test_where_they_cannot_be_honoured_they_are_refused(
    cluster_2: Cluster, table: dict[str, Any], settings: dict[str, Any], message: str
) -> None:
    tables = (TABLES[0], dataclasses.replace(TABLES[1], **table), TABLES[2])
    case = Case(tables=tables, batch_sizes=(6, 4), **settings)
    errors = cluster_2.run(error_of, case)
    assert errors[0] == errors[1]
    assert message in errors[0]


def error_of_dense_sequences() -> str:
    module = EmbeddingCollection(
        [EmbeddingConfig(name="t", num_embeddings=10, embedding_dim=8, feature_names=["f"])],
        device=torch.device("meta"),
    )
    sharder = fr.FusedEmbeddingCollectionSharder()
    plan = construct_module_sharding_plan(
        module, {"t": table_wise(rank=0, compute_kernel="dense")}, sharder, device_type="cpu"
    )
    group = dist.group.WORLD
    assert group is not None
    env = ShardingEnv.from_process_group(group)
    return error(lambda: sharder.shard(module, dict(plan), env, torch.device("cpu")))


def test_sequences_with_the_dense_kernel_are_refused_on_cpu(cluster_2: Cluster) -> None:
    """TorchRec's own writes past the end of a tensor there."""
    for message in cluster_2.run(error_of_dense_sequences):
        assert message.startswith(
            "plan of table 't' (table_wise on cpu): compute_kernel is 'dense', must be 'fused'"
        )
