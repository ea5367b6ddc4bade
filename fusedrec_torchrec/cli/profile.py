"""``fusedrec profile``: how the rows of the tables are accessed."""

import argparse
import json
import math
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from fusedrec_torchrec.access.access_profile import AccessProfile
from fusedrec_torchrec.access.hot_set import HotSet
from fusedrec_torchrec.access.profile import (
    Accesses,
    covered_by,
    draw_coverage,
    profile,
    rows_for,
    sample_profile,
    share_of_top,
)
from fusedrec_torchrec.access.samples import Source
from fusedrec_torchrec.cli.numbers import whole
from fusedrec_torchrec.cli.outputs import output_file, plot_file
from fusedrec_torchrec.core.files import naming, write_text
from fusedrec_torchrec.core.terminal import human_bytes, print_table
from fusedrec_torchrec.training.data.prepare import PrepareOptions, prepare
from fusedrec_torchrec.training.data.prepared import MANIFEST, PreparedData
from fusedrec_torchrec.training.data.spelling import as_flag
from fusedrec_torchrec.training.main import load_config
from fusedrec_torchrec.training.source import open_source

__all__ = ["add_command"]

READ = 1 << 16
# Floats of optimizer state: for each column, and for each row.
STATE_FLOATS = {"rowwise_adagrad": (0, 1), "adagrad": (1, 0), "sgd": (0, 0)}


def add_command(commands: Any) -> None:
    parser = commands.add_parser(
        "profile",
        help="show how the rows of the tables are accessed",
        description="Counts accesses to all rows: distinct ids in a batch, the share of accesses "
        "that the most used rows take, and the most used rows themselves.",
    )
    parser.add_argument(
        "data",
        nargs="+",
        help="a folder of prepared data, a training configuration (.yaml), or Criteo text files",
    )
    parser.add_argument("--batch-size", type=int, default=4096, help="(default %(default)s)")
    parser.add_argument(
        "--samples",
        type=whole(1),
        default=None,
        help="only the first so many; --share is of all of them",
    )
    parser.add_argument(
        "--top", type=whole(0), default=3, help="most used rows to show of each table"
    )
    parser.add_argument("--plot", type=plot_file, default=None, help="draws coverage curves (.png)")
    parser.add_argument(
        "--json", type=output_file, default=None, help="writes the figures to a file"
    )
    sampled = parser.add_argument_group("access profile and hot set, for training with hot rows")
    sampled.add_argument(
        "--save", type=output_file, default=None, help="writes an access profile (.npz)"
    )
    sampled.add_argument(
        "--share", type=float, default=0.05, help="of the samples it counts (default %(default)s)"
    )
    sampled.add_argument(
        "--counters",
        type=int,
        default=1 << 20,
        help="rows it counts at a time; bounds its memory and size (default %(default)s)",
    )
    sampled.add_argument(
        "--merge", type=Path, nargs="+", default=[], help="profiles of other data to add to it"
    )
    sampled.add_argument(
        "--sample-only",
        action="store_true",
        help="does not look at the other samples, and needs no counter for every row",
    )
    sampled.add_argument(
        "--hot-set", type=output_file, default=None, help="writes a hot set (.npz)"
    )
    size = sampled.add_mutually_exclusive_group()
    size.add_argument("--hot-rows", type=int, default=None, help="rows of the hot set")
    size.add_argument(
        "--memory",
        type=float,
        default=256,
        help="MiB of the hot set on each rank, weights and optimizer state (default %(default)s)",
    )
    sampled.add_argument(
        "--embedding-dim", type=int, default=64, help="columns of a row (default %(default)s)"
    )
    sampled.add_argument(
        "--optimizer", choices=list(STATE_FLOATS), default="rowwise_adagrad", help="of the tables"
    )
    parser.add_argument(
        "--on-bad-line", choices=["error", "skip"], default="error", help="of text files"
    )
    parser.add_argument("--quiet", action="store_true", help="no progress bars")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> None:
    sampled = None
    writes = arguments.save is not None or arguments.hot_set is not None
    if not writes and (arguments.merge or arguments.sample_only):
        raise ValueError("--merge and --sample-only need --save or --hot-set, to write to")
    if arguments.sample_only and arguments.plot is not None:
        raise ValueError("--plot needs all samples, for the true curve: leave out --sample-only")
    with tempfile.TemporaryDirectory() as scratch:
        source = _open(arguments, Path(scratch))
        progress = not arguments.quiet
        if writes:
            sampled = sample_profile(source, arguments.share, arguments.counters, progress)
            others = [AccessProfile.load(path) for path in arguments.merge]
            sampled = AccessProfile.merged([sampled, *others]) if others else sampled
            hot_set = HotSet.most_used(sampled, _hot_rows(arguments))
        result, figures = None, {}
        if sampled is None or not arguments.sample_only:
            result = profile(source, arguments.batch_size, arguments.samples, progress)
            figures = _figures(result, arguments.top)
            _print(result, figures)
        if sampled is not None:
            hot = _hot_figures(arguments, sampled, hot_set)
            if result is not None:
                hot |= _true_figures(hot_set, result, source)
            figures["hot_set"] = hot
            _print_hot_set(hot)
    if arguments.save is not None and sampled is not None:
        sampled.save(arguments.save)
        print(f"access profile: {arguments.save}")
    if arguments.hot_set is not None:
        hot_set.save(arguments.hot_set)
        print(f"hot set: {arguments.hot_set}")
    if arguments.json is not None:
        write_text(arguments.json, json.dumps(figures, indent=1))
    if arguments.plot is not None and result is not None:
        with naming(arguments.plot):
            draw_coverage(result, arguments.plot, sampled)
        print(f"coverage curves: {arguments.plot}")


def _row_bytes(arguments: argparse.Namespace) -> int:
    """Of a hot row on a rank."""
    if arguments.embedding_dim < 1:
        raise ValueError(f"--embedding-dim is {arguments.embedding_dim}, must be at least 1")
    per_column, per_row = STATE_FLOATS[arguments.optimizer]
    return 4 * (arguments.embedding_dim * (1 + per_column) + per_row)


def _hot_rows(arguments: argparse.Namespace) -> int:
    if arguments.hot_rows is not None:
        if arguments.hot_rows < 1:
            raise ValueError(f"--hot-rows is {arguments.hot_rows}, must be at least 1")
        return int(arguments.hot_rows)
    rows = 0
    if math.isfinite(arguments.memory):
        rows = int(arguments.memory * 2**20) // _row_bytes(arguments)
    if rows < 1:
        raise ValueError(
            f"--memory is {arguments.memory} MiB, must be at least {_row_bytes(arguments)} bytes, "
            "one row with its optimizer state"
        )
    return rows


def _hot_figures(
    arguments: argparse.Namespace, sampled: AccessProfile, hot_set: HotSet
) -> dict[str, Any]:
    """What the sample knows about the hot set."""
    inside = sum(
        int(sampled.counts[name][np.isin(sampled.ids[name], ids)].sum())
        for name, ids in hot_set.ids.items()
    )
    return {
        "samples": sampled.samples,
        "error": sampled.error,
        "rows": hot_set.rows,
        "bytes": hot_set.rows * _row_bytes(arguments),
        "coverage_in_the_sample": inside / max(sum(sampled.accesses.values()), 1),
    }


def _true_figures(hot_set: HotSet, result: Accesses, source: Source) -> dict[str, Any]:
    """What all samples know about it."""
    best = np.sort(result.all_counts())[::-1]
    starts = range(0, result.samples, READ)
    hot = sum(
        int(hot_set.hot_samples(source.read(start, min(start + READ, result.samples))).sum())
        for start in starts
    )
    return {
        "coverage": covered_by(hot_set, result),
        "best_coverage": float(best[: hot_set.rows].sum() / max(best.sum(), 1)),
        "hot_samples": hot / result.samples,
    }


def _print_hot_set(hot: dict[str, Any]) -> None:
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


def _open(arguments: argparse.Namespace, scratch: Path) -> Source:
    first = Path(arguments.data[0])
    if len(arguments.data) == 1 and first.suffix in (".yaml", ".yml"):
        return open_source(load_config(str(first), []), progress=not arguments.quiet)
    if len(arguments.data) == 1 and (first / MANIFEST).is_file():
        return PreparedData.open(first)
    options = PrepareOptions(on_bad_line=arguments.on_bad_line)
    data = prepare(arguments.data, scratch, options, not arguments.quiet, as_flag)
    if data.left_out:
        print("\n".join(data.left_out), file=sys.stderr)
    return data


def _figures(result: Accesses, top: int) -> dict[str, Any]:
    counts = result.all_counts()
    accesses = int(counts.sum())
    distinct = sum(table.distinct_in_batches for table in result.tables)
    in_batches = result.batches * accesses / max(result.samples, 1) * result.batch_size
    return {
        "samples": result.samples,
        "batch_size": result.batch_size,
        "accesses": accesses,
        "rows_used": len(counts),
        "distinct_in_a_batch": distinct / max(in_batches, 1),
        "top_shares": {str(s): share_of_top(counts, s) for s in (0.01, 0.022, 0.1, 0.13)},
        "tables": [
            {
                "name": table.name,
                "rows": table.rows,
                "rows_used": table.rows_used,
                "accesses": table.accesses,
                "distinct_in_a_batch": table.distinct_in_batches / max(result.batches, 1),
                "top_1_percent": share_of_top(table.counts, 0.01),
                "rows_for_90_percent": rows_for(table.counts, 0.9),
                "top_rows": table.top(top),
            }
            for table in result.tables
        ],
    }


def _print(result: Accesses, figures: dict[str, Any]) -> None:
    print_table(
        f"accesses to {len(result.tables)} tables",
        (
            "table",
            "rows",
            "used",
            f"distinct in {result.batch_size}",
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
            ("the most used rows", shares),
        ],
    )
