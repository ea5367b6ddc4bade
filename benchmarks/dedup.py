"""Where direct addressing beats sorting: the figures behind ``exchange/dedup.py``'s thresholds.

    python benchmarks/dedup.py

Times both methods interleaved, one thread, over key spaces, batch sizes and shares of unique
keys, and prints the median of the paired ratios (sort / direct: above 1, direct is faster).
"""

import argparse
import statistics
import time

import torch

from fusedrec_torchrec.exchange.dedup import Dedup, choose_method

KEY_SPACES = [1 << 16, 1 << 18, 1 << 20, 1 << 22, 1 << 24, 1 << 26]
BATCHES = [1 << 12, 1 << 15, 1 << 18, 1 << 20]
UNIQUE_SHARES = [0.02, 0.1, 0.3, 0.6, 0.95]


def keys_with_share(num_ids: int, key_space: int, share: float, seed: int) -> torch.Tensor:
    """Keys of which about ``share`` are unique, spread over the key space."""
    generator = torch.Generator().manual_seed(seed)
    wanted = max(1, int(num_ids * share))
    pool = torch.randint(key_space, (wanted,), generator=generator, dtype=torch.int32)
    repeats = pool[torch.randint(wanted, (num_ids - wanted,), generator=generator)]
    keys = torch.cat([pool, repeats])
    return keys[torch.randperm(num_ids, generator=generator)]


def median_ratio(num_ids: int, key_space: int, share: float, pairs: int) -> tuple[float, float]:
    """Median of (time of sort / time of direct), and the true share of unique keys."""
    deduplicate = Dedup(key_space)
    ratios = []
    true_share = 1.0
    for pair in range(pairs + 1):
        keys = keys_with_share(num_ids, key_space, share, pair)
        start = time.perf_counter()
        unique = deduplicate.by_sort(keys)
        middle = time.perf_counter()
        deduplicate.by_direct_addressing(keys)
        end = time.perf_counter()
        true_share = unique.keys_U.numel() / num_ids
        if pair:  # the first one warms up
            ratios.append((middle - start) / (end - middle))
    return statistics.median(ratios), true_share


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=9)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    print(f"{'key space':>10} {'ids':>8} {'unique':>7} {'sort/direct':>11}  chosen")
    worst = 1.0
    for key_space in KEY_SPACES:
        for num_ids in BATCHES:
            for share in UNIQUE_SHARES:
                ratio, true_share = median_ratio(num_ids, key_space, share, arguments.pairs)
                chosen = choose_method(num_ids, key_space, true_share)
                loss = 1 / ratio if chosen == "direct" else ratio
                worst = max(worst, loss)
                print(f"{key_space:>10} {num_ids:>8} {true_share:>7.2f} {ratio:>11.2f}  {chosen}")
    print(f"the worst choice costs {worst:.2f}x")


if __name__ == "__main__":
    main()
