"""Dedup over all features of all tables at once: unique keys in ascending order, and inverse.

Two methods with the same result:

- *sort*: radix sort of the keys, then compare neighbours.  No memory beyond the batch.
- *direct addressing*: a persistent slot per key of the key space, never cleared; ids scatter
  their position into it and those that read their own position back are the representatives.
  Only the (fewer) unique keys are sorted.

``choose_method`` holds the thresholds; ``benchmarks/dedup.py`` measures them.  On CUDA only the
sort is used, in static shapes: the number of unique keys never comes to the host, and the tail
of ``keys`` is padded with a key above all others.
"""

from dataclasses import dataclass

import torch

__all__ = ["Dedup", "Unique", "choose_method"]

# Measured by benchmarks/dedup.py, one thread: in larger key spaces sorting won at every batch
# size and share of unique keys; in these, direct addressing won up to the shares below, which
# depend on the number of ids (up to the first number, exclusive).  At 2^22 keys itself runs
# disagree: in some direct addressing wins by up to 2.8x, in others it loses by as much.
DIRECT_MAX_KEY_SPACE = 1 << 22
DIRECT_MAX_UNIQUE_SHARE = ((1 << 15, 0.6), (1 << 18, 0.12), (None, 0.3))


@dataclass(frozen=True)
class Unique:
    """``keys_U[inverse_N]`` are the keys that came in; ``keys_U`` is ascending.

    On CPU U is the number of unique keys.  On other devices it is N, and the entries behind the
    last unique key are the key space's size.
    """

    keys_U: torch.Tensor
    inverse_N: torch.Tensor


def choose_method(num_ids: int, key_space: int, unique_share: float) -> str:
    """``"direct"`` or ``"sort"``, whichever is faster on CPU.

    Args:
        num_ids: ids in the batch.
        key_space: number of keys there are.
        unique_share: unique keys per id, as last seen.
    """
    if key_space > DIRECT_MAX_KEY_SPACE:
        return "sort"
    max_share = next(
        share for limit, share in DIRECT_MAX_UNIQUE_SHARE if limit is None or num_ids < limit
    )
    return "direct" if unique_share <= max_share else "sort"


class Dedup:
    """Deduplicates keys of a key space of known size, by the fastest method for each batch."""

    def __init__(self, key_space: int) -> None:
        self._key_space = key_space
        self._slots: torch.Tensor | None = None
        self._unique_share = 1.0

    def __call__(self, keys_N: torch.Tensor) -> Unique:
        if keys_N.device.type != "cpu":
            return self.by_sort(keys_N, static_shape=True)
        num_ids = keys_N.numel()
        method = choose_method(num_ids, self._key_space, self._unique_share)
        unique = self.by_direct_addressing(keys_N) if method == "direct" else self.by_sort(keys_N)
        if num_ids:
            self._unique_share = unique.keys_U.numel() / num_ids
        return unique

    def by_sort(self, keys_N: torch.Tensor, static_shape: bool = False) -> Unique:
        sorted_N, order_N = torch.sort(keys_N)
        is_first_N = torch.ones_like(sorted_N, dtype=torch.bool)
        torch.ne(sorted_N[1:], sorted_N[:-1], out=is_first_N[1:])
        rank_N = is_first_N.cumsum(0, dtype=torch.int32).sub_(1)
        inverse_N = torch.empty_like(rank_N).scatter_(0, order_N, rank_N)
        if not static_shape:
            return Unique(sorted_N[is_first_N], inverse_N)
        padded_N = torch.full_like(sorted_N, self._key_space)
        return Unique(padded_N.scatter_(0, rank_N.long(), sorted_N), inverse_N)

    def by_direct_addressing(self, keys_N: torch.Tensor) -> Unique:
        if self._slots is None:
            with torch.inference_mode(False):  # it outlives an inference
                self._slots = torch.empty(self._key_space, dtype=torch.int32, device=keys_N.device)
        slots, index_N = self._slots, keys_N.long()
        position_N = torch.arange(keys_N.numel(), dtype=torch.int32, device=keys_N.device)
        slots.scatter_(0, index_N, position_N)
        is_last_N = slots.gather(0, index_N) == position_N
        unique_U = torch.sort(keys_N[is_last_N]).values
        slots.scatter_(0, unique_U.long(), position_N[: unique_U.numel()])
        return Unique(unique_U, slots.gather(0, index_N))
