"""TorchRec's model trackers (``init_torchrec_delta_tracker``), which cannot follow fused tables."""

from collections.abc import Iterable
from typing import NoReturn

__all__ = ["refuse_tracker"]


def refuse_tracker(tables: Iterable[str]) -> NoReturn:
    """Refuses a tracker where it is registered, because it would fail in the first batch.

    A tracker reads the ids of each feature from what a lookup is given.  A fused lookup is given
    rows without features, and never sees those that are replicated on the requester.

    Args:
        tables: names of the fused tables.
    """
    raise ValueError(
        f"tables {', '.join(tables)} are fused, which TorchRec's model trackers cannot "
        "follow: name their module in fqns_to_skip, or give the tables another sharding type"
    )
