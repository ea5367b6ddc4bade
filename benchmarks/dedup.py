"""How much faster the hash table in C++ is than the sort that takes its place without it.

    python benchmarks/dedup.py

Times both methods of ``exchange/dedup.py`` and ``torch.unique`` interleaved, one thread, over key
spaces, batch sizes and shares of unique keys, and prints medians of the paired ratios to the hash
table (above 1, the hash table is faster).
"""

import argparse
import statistics
import time
from collections.abc import Callable

import torch

from fusedrec_torchrec.core import native
from fusedrec_torchrec.core.terminal import print_table
from fusedrec_torchrec.exchange.dedup import Dedup

KEY_SPACES = [1 << 16, 1 << 20, 1 << 24, 1 << 28]
BATCHES = [1 << 12, 1 << 15, 1 << 18, 1 << 20]
UNIQUE_SHARES = [0.02, 0.1, 0.3, 0.6, 0.95]


def keys_with_share(num_ids: int, key_space: int, share: float, seed: int) -> torch.Tensor:
    """Returns keys of which about ``share`` are unique, spread over the key space."""
    generator = torch.Generator().manual_seed(seed)
    wanted = max(1, int(num_ids * share))
    pool = torch.randint(key_space, (wanted,), generator=generator, dtype=torch.int32)
    repeats = pool[torch.randint(wanted, (num_ids - wanted,), generator=generator)]
    keys = torch.cat([pool, repeats])
    return keys[torch.randperm(num_ids, generator=generator)]


def by_hash(keys: torch.Tensor, starts: torch.Tensor) -> object:
    """Numbers the rows of one table whose ids are the keys."""
    first, rows = torch.zeros(1, 1, dtype=torch.int64), starts[-1:].long()
    lengths = torch.empty(0, dtype=torch.int32)
    return torch.ops.fusedrec.number_rows(
        keys, lengths, [keys.numel()], rows, first, first, starts, None, [1], 0
    )


def seconds(function: Callable[[torch.Tensor], object], keys: torch.Tensor) -> float:
    start = time.perf_counter()
    function(keys)
    return time.perf_counter() - start


def compare(num_ids: int, key_space: int, share: float, pairs: int) -> tuple[object, ...]:
    """Returns the share of unique keys, the hash table's milliseconds, and others' ratios to it."""
    starts = torch.tensor([0, key_space // 2, key_space], dtype=torch.int32)
    dedup = Dedup(starts)
    times: list[tuple[float, float, float]] = []
    true_share = 1.0
    for pair in range(pairs + 1):
        keys = keys_with_share(num_ids, key_space, share, pair)
        true_share = keys.unique().numel() / num_ids
        measured = (
            seconds(lambda keys: by_hash(keys, starts), keys),
            seconds(dedup.by_sort, keys),
            seconds(lambda keys: torch.unique(keys, return_inverse=True), keys),
        )
        if pair:  # the first one warms up
            times.append(measured)
    return (
        key_space,
        num_ids,
        f"{true_share:.2f}",
        f"{1e3 * statistics.median(t[0] for t in times):.3f}",
        f"{statistics.median(t[1] / t[0] for t in times):.2f}",
        f"{statistics.median(t[2] / t[0] for t in times):.2f}",
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=9)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    if not native.available():
        parser.error("the C++ operators are not available on this machine")
    print_table(
        "dedup, one thread",
        ("key space", "ids", "unique", "hash ms", "sort / hash", "torch.unique / hash"),
        [
            compare(num_ids, key_space, share, arguments.pairs)
            for key_space in KEY_SPACES
            for num_ids in BATCHES
            for share in UNIQUE_SHARES
        ],
    )


if __name__ == "__main__":
    main()
