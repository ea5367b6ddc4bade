"""``fusedrec profile``: how the rows of the tables are accessed."""

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

from fusedrec_torchrec.data.prepare import PrepareOptions, prepare
from fusedrec_torchrec.data.prepared import MANIFEST, PreparedData
from fusedrec_torchrec.data.profile import (
    AccessProfile,
    draw_coverage,
    profile,
    rows_for,
    share_of_top,
)
from fusedrec_torchrec.data.samples import Source
from fusedrec_torchrec.terminal import print_table
from fusedrec_torchrec.training.main import load_config
from fusedrec_torchrec.training.source import open_source

__all__ = ["add_command"]


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
    parser.add_argument("--samples", type=int, default=None, help="only the first so many")
    parser.add_argument("--top", type=int, default=3, help="most used rows to show of each table")
    parser.add_argument("--plot", type=Path, default=None, help="draws coverage curves (.png)")
    parser.add_argument("--json", type=Path, default=None, help="writes the figures to a file")
    parser.add_argument(
        "--on-bad-line", choices=["error", "skip"], default="error", help="of text files"
    )
    parser.add_argument("--quiet", action="store_true", help="no progress bars")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> None:
    with tempfile.TemporaryDirectory() as scratch:
        source = _open(arguments, Path(scratch))
        result = profile(
            source, arguments.batch_size, arguments.samples, progress=not arguments.quiet
        )
    figures = _figures(result, arguments.top)
    _print(result, figures)
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(figures, indent=1))
    if arguments.plot is not None:
        draw_coverage(result, arguments.plot)
        print(f"coverage curves: {arguments.plot}")


def _open(arguments: argparse.Namespace, scratch: Path) -> Source:
    first = Path(arguments.data[0])
    if len(arguments.data) == 1 and first.suffix in (".yaml", ".yml"):
        return open_source(load_config(str(first), []), progress=not arguments.quiet)
    if len(arguments.data) == 1 and (first / MANIFEST).is_file():
        return PreparedData.open(first)
    options = PrepareOptions(on_bad_line=arguments.on_bad_line)
    data = prepare(arguments.data, scratch, options, progress=not arguments.quiet)
    if data.left_out:
        print("\n".join(data.left_out), file=sys.stderr)
    return data


def _figures(result: AccessProfile, top: int) -> dict[str, Any]:
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


def _print(result: AccessProfile, figures: dict[str, Any]) -> None:
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
