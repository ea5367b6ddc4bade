"""Dedup over all features of all tables at once: unique keys, part by part, and the inverse.

This is for CUDA, and for CPU without the C++ operator of ``row_numbers``: keys are sorted and
neighbours compared.  The order of the sort also tells which ids belong to a row, so that backward
needs no sort of its own.  On CUDA shapes are static: the number of unique keys never
comes to the host, and the tail of ``keys_U`` is padded with a key above all others.

Keys of replicated rows become keys of the replica here, before the sort.
"""

from dataclasses import dataclass

import torch

from fusedrec_torchrec.exchange.replication import ReplicaIndex

__all__ = ["Dedup", "Occurrences", "Unique"]


@dataclass(frozen=True)
class Occurrences:
    """The ids of each unique key.

    Attributes:
        order_N: positions of the ids, unique key after unique key.
        starts_U1: where the ids of each unique key begin in ``order_N``.
    """

    order_N: torch.Tensor
    starts_U1: torch.Tensor


@dataclass(frozen=True)
class Unique:
    """``keys_U[inverse_N]`` are the keys that came in.

    Attributes:
        keys_U: the unique keys, part after part.  On CPU U is their number.  On other devices it
            is N, and the entries behind the last unique key are the key space's size.
        inverse_N: for each id, the position of its key in ``keys_U``, int32.
        counts_P: unique keys of each part, int64.
        occurrences: which ids have which key; None if the method does not find out.
    """

    keys_U: torch.Tensor
    inverse_N: torch.Tensor
    counts_P: torch.Tensor
    occurrences: Occurrences | None = None


class Dedup:
    """Deduplicates keys.

    Args:
        part_starts_P1: first key of each part, and the size of the key space.
    """

    def __init__(self, part_starts_P1: torch.Tensor) -> None:
        self._part_starts_P1 = part_starts_P1

    def __call__(self, keys_N: torch.Tensor, index: ReplicaIndex | None = None) -> Unique:
        return self.by_sort(keys_N, static_shape=keys_N.device.type != "cpu", index=index)

    def by_sort(
        self, keys_N: torch.Tensor, static_shape: bool = False, index: ReplicaIndex | None = None
    ) -> Unique:
        """Deduplicates by a sort; keys come in ascending order."""
        if index is not None:
            keys_N = index.replace(keys_N)
        sorted_N, order_N = torch.sort(keys_N, stable=True)
        if static_shape:
            keys_U, rank_N, ids_U = self._neighbours(sorted_N)
        else:
            keys_U, rank_N, ids_U = torch.unique_consecutive(
                sorted_N, return_inverse=True, return_counts=True
            )
        inverse_N = rank_N.new_empty(rank_N.shape, dtype=torch.int32)
        inverse_N.scatter_(0, order_N, rank_N.int())
        starts_U1 = torch.ops.fbgemm.asynchronous_complete_cumsum(ids_U.int())
        counts_P = torch.searchsorted(keys_U, self._part_starts_P1).diff()
        return Unique(keys_U, inverse_N, counts_P, Occurrences(order_N.int(), starts_U1))

    def _neighbours(
        self, sorted_N: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Does what ``unique_consecutive`` does, without a look at the number of unique keys."""
        is_new_N = torch.zeros_like(sorted_N, dtype=torch.bool)
        torch.ne(sorted_N[1:], sorted_N[:-1], out=is_new_N[1:])
        rank_N = is_new_N.cumsum(0)
        padding = self._part_starts_P1[-1].expand_as(sorted_N)
        keys_U = padding.clone().scatter_(0, rank_N, sorted_N)
        ids_U = torch.zeros_like(rank_N).scatter_add_(0, rank_N, torch.ones_like(rank_N))
        return keys_U, rank_N, ids_U
