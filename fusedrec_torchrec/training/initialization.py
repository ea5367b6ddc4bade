"""Fills tables with initial weights that depend on seed, table and row only.

TorchRec draws the weights of each shard as the ranks come to them, so another sharding or another
number of ranks starts from other weights.  Here training starts from the same ones always.
"""

import zlib

import numpy as np
import torch
from torch import nn

from fusedrec_torchrec.checkpoint.local_shards import local_shards

__all__ = ["initialize_tables"]

BLOCK_ROWS = 4096


def initialize_tables(model: nn.Module, seed: int) -> None:
    """Fills all tables from U(-1/sqrt(rows), 1/sqrt(rows)), as the DLRM paper does."""
    for key, value in model.state_dict().items():
        if ".embedding_bags." not in key:
            continue
        name = key.split(".embedding_bags.")[1].removesuffix(".weight")
        rows, dim = value.size()
        for (first, column), shard in local_shards(value):
            _fill(shard, name, seed, rows, dim, first, column)


@torch.no_grad()
def _fill(
    shard: torch.Tensor, name: str, seed: int, rows: int, dim: int, first: int, column: int
) -> None:
    """Fills rows from ``first`` and columns from ``column`` of the table, a block at a time."""
    bound = rows**-0.5
    stop = first + shard.size(0)
    for block in range(first // BLOCK_ROWS, -(-stop // BLOCK_ROWS)):
        key = np.array([seed, zlib.crc32(name.encode()) << 32 | block], dtype=np.uint64)
        generator = np.random.Generator(np.random.Philox(key=key))
        values = torch.from_numpy(generator.random((BLOCK_ROWS, dim), dtype=np.float32))
        values = values.mul_(2 * bound).sub_(bound)
        start = block * BLOCK_ROWS
        low, high = max(first, start), min(stop, start + BLOCK_ROWS)
        shard[low - first : high - first].copy_(
            values[low - start : high - start, column : column + shard.size(1)]
        )
