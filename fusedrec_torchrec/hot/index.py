"""Which rows are hot: from the key of a row to the key of its replica.

Shape suffixes: H places of a bucket's replica, N keys.
"""

from collections.abc import Sequence

import torch

from fusedrec_torchrec.core import native, operators
from fusedrec_torchrec.exchange.layout import ExchangeLayout

__all__ = ["EMPTY", "HotIndex"]

EMPTY = -1  # instead of a key: nobody lives in this place


class HotIndex:
    """The hot set that a batch is routed by; it never changes, a new hot set is a new index.

    Args:
        layout: with room for the hot rows.
        home_keys: of each bucket, the key of the row in each place of its replica, or ``EMPTY``.
        version: which hot set this is, counted from 0.
    """

    def __init__(
        self, layout: ExchangeLayout, home_keys: Sequence[torch.Tensor], version: int = 0
    ) -> None:
        assert layout.replica_capacity is not None
        self.home_keys = [keys_H.cpu().long() for keys_H in home_keys]
        self.version = version
        starts_P1, owners = layout.part_starts_P1.tolist(), layout.owners
        keys, replicas = [], []
        for k, keys_H in enumerate(self.home_keys):
            assert keys_H.numel() == layout.replica_capacity[k], (
                keys_H.numel(),
                layout.replica_capacity,
            )
            places = (keys_H != EMPTY).nonzero().flatten()
            keys.append(keys_H[places])
            replicas.append(places + starts_P1[k * owners + layout.world_size])
        order = torch.argsort(torch.cat(keys))
        # Never empty: a key that no id has stands at the end.
        nobody = torch.tensor([layout.key_space])
        hot_keys = torch.cat(keys)[order].to(layout.key_dtype)
        hot_replicas = torch.cat(replicas)[order].to(layout.key_dtype)
        self._keys = torch.cat([hot_keys, nobody.to(hot_keys)]).to(layout.device)
        self._replicas = torch.cat([hot_replicas, nobody.to(hot_keys)]).to(layout.device)
        # The same pairs the other way round; replicas come in the order of buckets and places.
        self._replicas_up = torch.cat([torch.cat(replicas), nobody]).to(self._keys)
        self._homes = torch.cat([torch.cat(keys), nobody]).to(self._keys)
        self.table: torch.Tensor | None = None
        """For the operator ``number_rows``, which the C++ operators make it for."""
        if native.available() and operators.available_on(layout.device, "number_rows"):
            table = torch.ops.fusedrec.hot_table(hot_keys, hot_replicas)
            self.table = table.to(layout.device)

    def homes_of(self, keys_N: torch.Tensor) -> torch.Tensor:
        """Returns the keys, those of replicas replaced by the keys of their rows."""
        at_N = torch.searchsorted(self._replicas_up, keys_N)
        is_replica_N = self._replicas_up.index_select(0, at_N) == keys_N
        return torch.where(is_replica_N, self._homes.index_select(0, at_N), keys_N)

    def replace(self, keys_N: torch.Tensor) -> torch.Tensor:
        """Returns the keys, those of hot rows replaced by the keys of their replicas."""
        at_N = torch.searchsorted(self._keys, keys_N)
        is_hot_N = self._keys.index_select(0, at_N) == keys_N
        return torch.where(is_hot_N, self._replicas.index_select(0, at_N), keys_N)
