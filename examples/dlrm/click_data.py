"""Generated clicks with a planted model, so that loss and AUC mean something.

Ids follow a Zipf law in every table.  Each id has a hidden effect, each dense feature a hidden
weight; a click is drawn with the probability that their sum gives.  Batch i is the same whatever
the number of ranks: ranks take slices of it.
"""

from dataclasses import dataclass

import torch
from torchrec.datasets.utils import Batch
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

__all__ = ["ClickData"]


@dataclass(frozen=True, kw_only=True)
class ClickData:
    """A stream of batches.

    Attributes:
        table_rows: rows of each table.
        dense_features: number of dense features.
        batch_size: samples of all ranks together.
        zipf: exponent of the Zipf law of ids.
        seed: of data and planted model.
    """

    table_rows: tuple[int, ...]
    dense_features: int
    batch_size: int
    zipf: float = 1.1
    seed: int = 0

    @property
    def features(self) -> list[str]:
        return [f"cat_{i}" for i in range(len(self.table_rows))]

    def batch(self, index: int, rank: int, world_size: int) -> Batch:
        """Rank's slice of batch ``index``."""
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + index)
        dense = torch.randn(self.batch_size, self.dense_features, generator=generator)
        ids = torch.stack([self._zipf_ids(rows, generator) for rows in self.table_rows])
        logit = -1.0 + 0.5 * (dense * self._effect(torch.arange(self.dense_features), 99)).sum(1)
        for table, row in enumerate(ids):
            logit += self._effect(row, table)
        clicks = torch.rand(self.batch_size, generator=generator) < torch.sigmoid(logit)

        mine = slice(
            self.batch_size * rank // world_size, self.batch_size * (rank + 1) // world_size
        )
        return Batch(
            dense_features=dense[mine],
            sparse_features=KeyedJaggedTensor(
                keys=self.features,
                values=ids[:, mine].flatten(),
                lengths=torch.ones(ids[:, mine].numel(), dtype=torch.int32),
            ),
            labels=clicks[mine].float(),
        )

    def _zipf_ids(self, rows: int, generator: torch.Generator) -> torch.Tensor:
        """Draws from the continuous Zipf law on [1, rows + 1) by inverting its distribution."""
        uniform = torch.rand(self.batch_size, generator=generator, dtype=torch.float64)
        power = 1.0 - self.zipf
        top = (rows + 1.0) ** power
        rank = (1.0 + uniform * (top - 1.0)) ** (1.0 / power)
        return (rank.long() - 1).clamp_(0, rows - 1)

    def _effect(self, ids: torch.Tensor, table: int) -> torch.Tensor:
        """The hidden effect of an id: a pseudo-random number in [-1, 1)."""
        mixed = (ids.long() + 1) * 2_654_435_761 + (table + 1) * 40_503 * (self.seed + 7)
        mixed = (mixed ^ (mixed >> 15)) * 2_246_822_519 % (1 << 31)
        return mixed.float() / (1 << 30) - 1.0
