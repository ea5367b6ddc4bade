"""Sharded tables for tests of the layout, without a process group."""

import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from torch.distributed._shard.sharded_tensor.metadata import ShardedTensorMetadata
from torchrec.distributed.embedding_types import EmbeddingComputeKernel, ShardedEmbeddingTable
from torchrec.distributed.types import ShardMetadata
from torchrec.modules.embedding_configs import DataType, PoolingType


def sharded_tables(
    specs: list[dict[str, object]], row_starts: list[list[int]], device: str = "cpu"
) -> list[list[ShardedEmbeddingTable]]:
    """Per rank, the tables of ``specs``; table t's rank r owns rows from ``row_starts[t][r]``."""
    ranks = len(row_starts[0]) - 1
    per_rank = []
    for rank in range(ranks):
        tables = []
        for spec, starts in zip(specs, row_starts, strict=True):
            dim = int(str(spec.get("dim", 8)))
            features = spec.get("features", [f"f_{spec['name']}"])
            shards = [
                ShardMetadata(
                    shard_offsets=[starts[r], 0],
                    shard_sizes=[starts[r + 1] - starts[r], dim],
                    placement=f"rank:{r}/{device}",
                )
                for r in range(ranks)
            ]
            tables.append(
                ShardedEmbeddingTable(
                    num_embeddings=starts[-1],
                    embedding_dim=dim,
                    name=str(spec["name"]),
                    feature_names=features,
                    embedding_names=features,
                    data_type=spec.get("data_type", DataType.FP32),
                    pooling=spec.get("pooling", PoolingType.SUM),
                    local_rows=shards[rank].shard_sizes[0],
                    local_cols=dim,
                    compute_kernel=spec.get("kernel", EmbeddingComputeKernel.FUSED),
                    local_metadata=shards[rank],
                    global_metadata=ShardedTensorMetadata(shards, torch.Size([starts[-1], dim])),
                    fused_params={
                        "optimizer": spec.get("optimizer", EmbOptimType.EXACT_SGD),
                        "learning_rate": spec.get("lr", 0.1),
                    },
                )
            )
        per_rank.append(tables)
    return per_rank
