"""TorchRec's sharding environment of a rank in the grid, with how replicas stay equal."""

from collections.abc import Sequence
from typing import Any

from torchrec.distributed.types import ShardingEnv2D

from fusedrec_torchrec.compat.bucket_table import BucketKernel
from fusedrec_torchrec.grid.gradients import SharedUpdates
from fusedrec_torchrec.sharding.grid_options import GridOptions

__all__ = ["GridShardingEnv"]


class GridShardingEnv(ShardingEnv2D):
    """The environment that tables are sharded in.

    Args:
        options: the user's settings.
        **kwargs: those of ``ShardingEnv2D``.
    """

    def __init__(self, options: GridOptions, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._options = options

    def replications(self, kernels: Sequence[BucketKernel]) -> list[SharedUpdates]:
        """Makes the updates that the replicas of a module's buckets have in common, if any."""
        if self._options.sync != "gradients":
            return []
        duplicates = self.sharding_pg.size() > 1
        return [SharedUpdates(self.replica_pg, kernels, duplicates, self._options.codec)]
