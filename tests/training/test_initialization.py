"""Initial weights depend on seed, table and row only."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed._shard.sharded_tensor.api import ShardedTensor

from fusedrec_torchrec.core.config import from_mapping
from fusedrec_torchrec.training.config import TrainConfig
from fusedrec_torchrec.training.model import build_model, shard_model
from fusedrec_torchrec.training.source import open_source
from tests.cluster import Cluster
from tests.training.runs import CPU, small


def weights(data: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Whole tables on rank 0."""
    config = from_mapping(TrainConfig, data)
    source = open_source(config)
    model, _ = shard_model(build_model(config.model, source, CPU), config, source, CPU)
    tables = {}
    for key, value in model.state_dict().items():
        if ".embedding_bags." in key:
            name = key.split(".")[-2]
            if isinstance(value, ShardedTensor):
                whole = torch.empty(value.size()) if dist.get_rank() == 0 else None
                value.gather(0, whole)
                tables[name] = torch.empty(0) if whole is None else whole
            else:
                tables[name] = value.clone()
    return tables


def test_any_sharding_on_any_ranks_starts_from_the_same_weights(
    clusters: Callable[[int], Cluster], tmp_path: Path
) -> None:
    data = small(tmp_path)
    for table in data["tables"][:2]:
        table["rows"] = 9001  # more than one block of rows
    data["model"] = {"embedding_dim": 128, "dense_arch": [128], "over_arch": [4, 1]}
    reference = clusters(1).run(weights, data)[0]
    for name, value in reference.items():
        bound = len(value) ** -0.5
        assert value.abs().max() <= bound and value.abs().max() > 0.98 * bound, name
        assert value.mean().abs() < 0.05 * bound
        assert len(value.unique()) > 0.9 * min(value.numel(), 2**20)
    for block in range(4096, 9001, 4096):  # no block of rows repeats another
        for name in ("a", "b"):
            table = reference[name]
            assert not torch.equal(table[block : block + 50], table[:50])
    assert not torch.equal(reference["a"][:50], reference["c"][:50])
    for ranks, sharding in ((2, "fused_row_wise"), (4, "row_wise"), (2, "column_wise")):
        found = clusters(ranks).run(weights, {**data, "sharding": {"type": sharding}})[0]
        for name, value in reference.items():
            assert torch.equal(found[name], value), (ranks, sharding, name)
    found = clusters(2).run(weights, {**data, "sharding": {"type": "data_parallel"}})
    for rank in found:
        assert torch.equal(rank["b"], reference["b"])
    other = clusters(1).run(weights, {**data, "seed": 1})[0]
    assert not torch.equal(other["a"], reference["a"])
