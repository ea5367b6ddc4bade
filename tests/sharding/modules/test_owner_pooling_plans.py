"""Plans of owner-pooled tables that cannot be carried out are refused on all ranks."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from torchrec.distributed.sharding_plan import construct_module_sharding_plan
from torchrec.distributed.types import ShardingEnv, ShardingPlan, ShardMetadata
from torchrec.modules.embedding_configs import DataType, EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection

import fusedrec_torchrec as fr
from tests.case import Case, Table, Wrapper, parallel, sharded, unsharded
from tests.cluster import Cluster
from tests.parity import train_step


def error_of_sharding(
    kind: str,
    where: Any,
    config: dict[str, Any] | None = None,
    fused_params: dict[str, Any] | None = None,
    plan: dict[str, Any] | None = None,
    shards: list[tuple[int, int, int, int, int]] | None = None,
) -> str:
    """Shards one table on two ranks; shards are (row offset, column offset, rows, dim, rank)."""
    table = {"name": "t", "num_embeddings": 10, "embedding_dim": 8, "feature_names": ["f"]}
    bags = EmbeddingBagCollection(
        [EmbeddingBagConfig(**{**table, **(config or {})})], device=torch.device("meta")
    )
    group = dist.group.WORLD
    assert group is not None
    sharder = fr.FusedEmbeddingBagCollectionSharder(fused_params)
    try:
        weight = sharder.shardable_parameters(bags)["t"]
        sharding = getattr(fr, kind)(where, **(plan or {}))(weight, 2, 2, "cpu", sharder)
        if shards is not None:
            assert sharding.sharding_spec is not None
            sharding.sharding_spec.shards = [
                ShardMetadata([r0, c0], [rows, dim], f"rank:{rank}/cpu")
                for r0, c0, rows, dim, rank in shards
            ]
        sharder.shard(
            bags, {"t": sharding}, ShardingEnv.from_process_group(group), torch.device("cpu")
        )
    except ValueError as error:
        return str(error)
    raise AssertionError("no error")


TABLE, COLUMN = "fused_table_wise", "fused_column_wise"


@pytest.mark.parametrize(
    ("kind", "where", "settings", "message"),
    [
        (TABLE, 2, {}, f"ranks of a {TABLE} table are [2], must be different ones in [0, 2)"),
        (TABLE, -1, {}, f"ranks of a {TABLE} table are [-1], must be different ones in [0, 2)"),
        (COLUMN, [], {}, f"ranks of a {COLUMN} table are [], must be different ones in [0, 2)"),
        (
            *(COLUMN, [0, 0], {}),
            f"ranks of a {COLUMN} table are [0, 0], must be different ones in [0, 2)",
        ),
        (
            *(COLUMN, [0, 1], {"config": {"embedding_dim": 12}}),
            f"12 columns of a {COLUMN} table are to be split over 2 ranks, each must get the same "
            "number, a multiple of 4",
        ),
        (
            *(COLUMN, [0, 1], {"shards": [(0, 0, 10, 4, 0), (0, 4, 10, 4, 0)]}),
            f"plan of table 't' ({COLUMN}): shards lie on ranks [0, 0], must be different ones of "
            "[0, 1]",
        ),
        (
            *(TABLE, 0, {"shards": [(0, 0, 10, 8, 2)]}),
            f"plan of table 't' ({TABLE}): shards lie on ranks [2], must be different ones of "
            "[0, 1]",
        ),
        (
            *(TABLE, 0, {"shards": [(0, 0, 10, 4, 0), (0, 4, 10, 4, 1)]}),
            f"plan of table 't' ({TABLE}): there are 2 shards, must be one",
        ),
        (
            *(COLUMN, [0, 1], {"shards": [(0, 0, 10, 6, 0), (0, 6, 10, 2, 1)]}),
            f"plan of table 't' ({COLUMN}): shard of rank 0 has offset [0, 0] and size [10, 6], "
            "must have offset [0, 0] and size [10, 4]: all rows, and as many of the 8 columns as "
            "the others",
        ),
        (
            *(COLUMN, [0, 1], {"shards": [(0, 4, 10, 4, 0), (0, 0, 10, 4, 1)]}),
            f"plan of table 't' ({COLUMN}): shard of rank 0 has offset [0, 4] and size [10, 4], "
            "must have offset [0, 0] and size [10, 4]: all rows, and as many of the 8 columns as "
            "the others",
        ),
        (
            *(TABLE, 0, {"shards": [(0, 0, 9, 8, 0)]}),
            f"plan of table 't' ({TABLE}): shard of rank 0 has offset [0, 0] and size [9, 8], must "
            "have offset [0, 0] and size [10, 8]: all rows, and as many of the 8 columns as the "
            "others",
        ),
        (
            *(TABLE, 0, {"fused_params": {"optimizer": EmbOptimType.ADAM}}),
            f"table 't' ({TABLE} on cpu): optimizer is 'adam', must be one of "
            "['exact_sgd', 'exact_adagrad', 'exact_row_wise_adagrad']",
        ),
        (
            *(COLUMN, [1, 0], {"plan": {"compute_kernel": "dense"}}),
            f"table 't' ({COLUMN} on cpu): compute_kernel is 'dense', must be one of ['fused']",
        ),
        (
            *(TABLE, 1, {"config": {"data_type": DataType.INT8}}),
            f"table 't' ({TABLE} on cpu): data_type is 'INT8', must be one of ['FP32', 'FP16']",
        ),
    ],
    ids=lambda value: str(value)[:40],
)
def test_refused_with_the_reason(
    cluster_2: Cluster, kind: str, where: Any, settings: dict[str, Any], message: str
) -> None:
    assert cluster_2.run(error_of_sharding, kind, where, **settings) == [message, message]


def error_of(case: Case) -> str:
    try:
        sharded(case)
    except ValueError as error:
        return str(error)
    return "no error"


@pytest.mark.parametrize("kind", [TABLE, COLUMN])
@pytest.mark.parametrize(
    ("module", "message"),
    [
        (
            "ec",
            "table 'b' of an EmbeddingCollection is {}, must be fused_row_wise: sequences are not "
            "pooled; fused_row_wise(rows_per_rank=...) can put a whole table on one rank",
        ),
        (
            "fp_ebc",
            "table 'b' is {} and its features are processed, must be fused_row_wise: the gradients "
            "of learned weights need the rows, which stay with their owner",
        ),
    ],
)
@pytest.mark.parametrize("beside", ["fused_row_wise", "table_wise"])
def test_modules_that_owners_cannot_pool_for(
    cluster_2: Cluster, kind: str, module: str, message: str, beside: str
) -> None:
    tables = (Table("a", 50, sharding=beside), Table("b", 33, sharding=kind))
    case = Case(tables=tables, batch_sizes=(4, 4), kind=module)
    assert cluster_2.run(error_of, case) == [message.format(kind)] * 2


def one_plan_twice() -> None:
    """Two models of one plan train alike, and the plan stays what it was."""
    case = Case(
        tables=(Table("a", 50, sharding=TABLE), Table("b", 33, dim=16, sharding=COLUMN)),
        batch_sizes=(4, 4),
    )
    module = unsharded(case)
    sharders = fr.fused_sharders()
    by_table = construct_module_sharding_plan(
        module,
        {"a": fr.fused_table_wise(1), "b": fr.fused_column_wise([1, 0])},
        sharder=sharders[0],
        device_type="cpu",
    )
    plan = ShardingPlan({"sparse": by_table})
    before = str(plan)
    models = [parallel(Wrapper(unsharded(case)), plan, sharders) for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    for step in range(3):
        one, other = (train_step(case, model, step) for model in models)
        assert all(torch.equal(one[name], other[name]) for name in one)
    assert str(plan) == before


def test_a_plan_can_be_used_twice(cluster_2: Cluster) -> None:
    cluster_2.run(one_plan_twice)
