"""Tables and plans that cannot be sharded are refused when they are sharded, with the reason."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from torchrec.distributed.types import ShardingEnv, ShardMetadata
from torchrec.modules.embedding_configs import DataType, EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection

import fusedrec_torchrec as fr
from tests.cluster import Cluster


def error_of_sharding(
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
        sharding = fr.fused_row_wise(**(plan or {}))(weight, 2, 2, "cpu", sharder)
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


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"config": {"embedding_dim": 6}},
            "table 't' (fused_row_wise on cpu): embedding_dim is 6, must be a positive multiple "
            "of 4",
        ),
        (
            {"fused_params": {"optimizer": EmbOptimType.ADAM}},
            "table 't' (fused_row_wise on cpu): optimizer is 'adam', must be one of "
            "['exact_sgd', 'exact_adagrad', 'exact_row_wise_adagrad']",
        ),
        (
            {"plan": {"compute_kernel": "fused_uvm"}},
            "table 't' (fused_row_wise on cpu): compute_kernel is 'fused_uvm', must be one of "
            "['fused']",
        ),
        (
            {"plan": {"compute_kernel": "fused_uvm_caching"}},
            "table 't' (fused_row_wise on cpu): compute_kernel is 'fused_uvm_caching', must be "
            "one of ['fused']",
        ),
        (
            {"plan": {"compute_kernel": "dense"}},
            "table 't' (fused_row_wise on cpu): compute_kernel is 'dense', must be one of "
            "['fused']",
        ),
        (
            {"config": {"data_type": DataType.INT8}},
            "table 't' (fused_row_wise on cpu): data_type is 'INT8', must be one of "
            "['FP32', 'FP16']",
        ),
        (
            {"plan": {"rows_per_rank": [3, 3]}},
            "rows_per_rank is [3, 3], must be 2 numbers of at least 0 that add up to 10",
        ),
        (
            {"plan": {"rows_per_rank": [10]}},
            "rows_per_rank is [10], must be 2 numbers of at least 0 that add up to 10",
        ),
        (
            {"plan": {"rows_per_rank": [-1, 11]}},
            "rows_per_rank is [-1, 11], must be 2 numbers of at least 0 that add up to 10",
        ),
        (
            {"shards": [(0, 0, 10, 8, 0)]},
            "plan of table 't' (fused_row_wise): shards lie on ranks [0], must be one shard on "
            "each of ranks [0, 1], in this order (a shard may have no rows)",
        ),
        (
            {"shards": [(0, 0, 5, 8, 1), (5, 0, 5, 8, 0)]},
            "plan of table 't' (fused_row_wise): shards lie on ranks [1, 0], must be one shard "
            "on each of ranks [0, 1], in this order (a shard may have no rows)",
        ),
        (
            {"shards": [(0, 0, 5, 8, 0), (6, 0, 4, 8, 1)]},
            "plan of table 't' (fused_row_wise): shard of rank 1 has offset [6, 0] and size "
            "[4, 8], must have offset [5, 0] and all 8 columns",
        ),
        (
            {"shards": [(0, 0, 5, 4, 0), (5, 0, 5, 4, 1)]},
            "plan of table 't' (fused_row_wise): shard of rank 0 has offset [0, 0] and size "
            "[5, 4], must have offset [0, 0] and all 8 columns",
        ),
        (
            {"shards": [(0, 0, 5, 8, 0), (5, 0, 4, 8, 1)]},
            "plan of table 't' (fused_row_wise): shards have 9 rows in total, must be 10",
        ),
    ],
    ids=lambda value: str(value)[:40],
)
def test_refused_with_the_reason(
    cluster_2: Cluster, settings: dict[str, Any], message: str
) -> None:
    assert cluster_2.run(error_of_sharding, **settings) == [message, message]
