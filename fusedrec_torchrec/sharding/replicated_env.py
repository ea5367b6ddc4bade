"""A sharding environment whose shards have replicas elsewhere, as 2D parallelism has."""

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

from fusedrec_torchrec.compat.bucket_table import BucketKernel
from fusedrec_torchrec.exchange.replication import Replication

__all__ = ["ReplicatedEnv"]


@runtime_checkable
class ReplicatedEnv(Protocol):
    """An environment that knows how replicas of buckets stay equal."""

    def replications(self, kernels: Sequence[BucketKernel]) -> Sequence[Replication]:
        """Makes what keeps the replicas of buckets equal, if something must in every step."""
        ...
