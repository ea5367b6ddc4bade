"""The figures that ``fusedrec profile`` shows."""

from typing import Any

import numpy as np

from fusedrec_torchrec.access.access_profile import AccessProfile
from fusedrec_torchrec.access.hot_set import HotSet
from fusedrec_torchrec.access.profile import Accesses, covered_by, rows_for, share_of_top
from fusedrec_torchrec.access.samples import Samples, Source
from fusedrec_torchrec.core.terminal import human_bytes, print_table

__all__ = ["accesses", "hot_set", "print_accesses", "print_hot_set", "true_hot_set"]

READ = 1 << 16  # samples at once


def hot_set(sampled: AccessProfile, chosen: HotSet, row_bytes: int) -> dict[str, Any]:
    """Returns what the sample knows about the hot set."""
    inside = sum(
        int(sampled.counts[name][np.isin(sampled.ids[name], ids)].sum())
        for name, ids in chosen.ids.items()
    )
    return {
        "samples": sampled.samples,
        "error": sampled.error,
        "rows": chosen.rows,
        "bytes": chosen.rows * row_bytes,
        "coverage_in_the_sample": inside / max(sum(sampled.accesses.values()), 1),
    }


def true_hot_set(chosen: HotSet, result: Accesses, source: Source) -> dict[str, Any]:
    """Returns what all samples know about the hot set."""
    best = np.sort(result.all_counts())[::-1]
    starts = range(0, result.samples, READ)

    def read(start: int) -> Samples:
        return source.read(start, min(start + READ, result.samples))

    hot = sum(
        int(chosen.hot_samples(read(start), source.features.values()).sum()) for start in starts
    )
    return {
        "coverage": covered_by(chosen, result),
        "best_coverage": float(best[: chosen.rows].sum() / max(best.sum(), 1)),
        "hot_samples": hot / result.samples,
    }


def print_hot_set(hot: dict[str, Any]) -> None:
    """Prints the figures of ``hot_set`` and, where there are any, of ``true_hot_set``."""
    shares = {
        "accesses they take, in the sample": "coverage_in_the_sample",
        "in truth": "coverage",
        "the best rows, as many, take": "best_coverage",
        "samples that need hot rows only": "hot_samples",
    }
    print_table(
        f"hot set, picked by {hot['samples']} samples",
        ("", ""),
        [
            ("rows", hot["rows"]),
            ("memory on each rank", human_bytes(hot["bytes"])),
            *((title, f"{hot[key]:.1%}") for title, key in shares.items() if key in hot),
            ("counts are too low by at most", hot["error"]),
        ],
    )


def accesses(result: Accesses, top: int) -> dict[str, Any]:
    """Returns what the accesses to all rows are like; ``top`` most used rows of each table."""
    counts = result.all_counts()
    total = int(counts.sum())
    distinct = sum(table.distinct_in_batches for table in result.tables)
    in_batches = result.batches * total / max(result.samples, 1) * result.batch_size
    return {
        "samples": result.samples,
        "batch_size": result.batch_size,
        "accesses": total,
        "rows_used": len(counts),
        "distinct_in_a_batch": distinct / max(in_batches, 1),
        "distinct_bags_in_a_batch": sum(t.distinct_bags_in_batches for t in result.tables)
        / max(sum(t.bags_in_batches for t in result.tables), 1),
        "top_shares": {str(s): share_of_top(counts, s) for s in (0.01, 0.022, 0.1, 0.13)},
        "tables": [
            {
                "name": table.name,
                "rows": table.rows,
                "rows_used": table.rows_used,
                "accesses": table.accesses,
                "distinct_in_a_batch": table.distinct_in_batches / max(result.batches, 1),
                "bags_in_a_batch": table.bags_in_batches / max(result.batches, 1),
                "distinct_bags_in_a_batch": table.distinct_bags_in_batches / max(result.batches, 1),
                "ids_of_distinct_bags": table.ids_of_distinct_bags / max(result.batches, 1),
                "top_1_percent": share_of_top(table.counts, 0.01),
                "rows_for_90_percent": rows_for(table.counts, 0.9),
                "top_rows": table.top(top),
            }
            for table in result.tables
        ],
    }


def print_accesses(result: Accesses, figures: dict[str, Any]) -> None:
    """Prints the figures of ``accesses``."""
    print_table(
        f"accesses to {len(result.tables)} tables",
        (
            "table",
            "rows",
            "used",
            f"distinct in {result.batch_size}",
            "distinct bags",
            "top 1 % take",
            "rows for 90 %",
            "most used rows (accesses)",
        ),
        [
            (
                table["name"],
                table["rows"],
                table["rows_used"],
                f"{table['distinct_in_a_batch']:.0f}",
                f"{table['distinct_bags_in_a_batch']:.0f}",
                f"{table['top_1_percent']:.1%}",
                table["rows_for_90_percent"],
                ", ".join(f"row {row} ({count})" for row, count in table["top_rows"]),
            )
            for table in figures["tables"]
        ],
    )
    shares = ", ".join(f"{float(s):.1%} take {v:.1%}" for s, v in figures["top_shares"].items())
    print_table(
        "all tables together",
        ("", ""),
        [
            ("samples", figures["samples"]),
            ("accesses", figures["accesses"]),
            ("rows used", figures["rows_used"]),
            (
                f"distinct ids in {result.batch_size} samples",
                f"{figures['distinct_in_a_batch']:.1%}",
            ),
            (
                f"distinct bags in {result.batch_size} samples",
                f"{figures['distinct_bags_in_a_batch']:.1%}",
            ),
            ("the most used rows", shares),
        ],
    )
